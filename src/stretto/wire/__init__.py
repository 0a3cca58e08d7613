"""Communication between processes: messages over sockets, peer identity, and shared memory files."""
