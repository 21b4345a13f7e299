"""The error that ends a staging, an install or a boot."""


class InstallError(Exception):
    """A version cannot be staged or installed. The message names the affected tensors."""
