"""What running a program takes, of training or of a weight update: an executor, its lanes, and a supervisor."""
