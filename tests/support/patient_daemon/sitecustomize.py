"""In the path of a daemon that a test starts: it waits longer for nodes to lay out files, which a busy machine delays."""

from resharder.server.node import home_state

home_state.LAYOUT_SECONDS = 60.0
