"""Units of sizes in messages: one form for daemon, command line and plugin."""


def size_text(count: int) -> str:
    """Format bytes in MiB, or in GiB from 256 MiB on."""
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"
