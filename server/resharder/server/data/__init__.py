"""The data port: files of READY versions by HTTP ranges, for readers on other hosts."""
