"""The error that ends an install, a boot or a staging."""


class InstallError(Exception):
    """The message names the tensors and what was expected of them."""
