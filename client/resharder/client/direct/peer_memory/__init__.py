"""Peer memory: transfers between processes of one host in which a worker copies from a rank's memory itself.

meeting    which pairs share memory, agreed by both sides
export     a rank's memory, as blocks that other processes can map
mapping    those blocks in a worker's address space
messages   messages between the two sides, over a Unix socket
owner      a rank's side of a pair
reader     a worker's side of a pair
"""
