"""The process on a host without a daemon: it holds versions in the host's shared memory and passes pieces on."""
