"""Does it all work on this machine? Every schedule trained against one process, links timed, a push made."""
