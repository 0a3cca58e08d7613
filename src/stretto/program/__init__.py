"""Programs: tasks on lanes, made from plans."""
