"""In the path of a daemon that a test starts: it waits longer for nodes to lay out files, which a busy machine delays."""

from resharder.server.nodes import homes

homes.LAYOUT_SECONDS = 60.0
