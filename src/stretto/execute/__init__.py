"""What running a program takes, of training or of a weight update: lanes that wait, and a supervisor."""
