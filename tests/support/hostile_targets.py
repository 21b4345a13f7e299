"""Every reader of hostile files and messages, by name, for `tools.fuzz_files` and for tests."""

from collections.abc import Callable
from random import Random

from tests.support import hostile_files as files
from tests.support import hostile_security as security
from tests.support.hostile_files import Workspace


def torch_dist(random: Random, workspace: Workspace) -> str:
    """Open a distributed checkpoint of Megatron, and read all of its tensors."""
    from tests.support import hostile_torch_dist  # imports Megatron, which takes seconds

    return hostile_torch_dist.torch_dist(random, workspace)


TARGETS: dict[str, Callable[[Random, Workspace], str]] = {
    each.__name__: each
    for each in (
        files.configuration, files.store_folder, files.version_manifest, files.archive_marker, files.fleets, files.events,
        files.checkpoint, files.mapped_version, files.chunk_frame, files.direct_message, files.shared_page,
        security.tls_files, security.token_files, torch_dist,
    )
}  # fmt: skip
"""Readers by name."""


def try_seed(name: str, seed: str, workspace: Workspace) -> str:
    """Run one input of a target. A fault names the seed in a note."""
    try:
        return TARGETS[name](Random(f"{name}/{seed}"), workspace)
    except BaseException as error:
        error.add_note(f"repeat it with: python -m tools.fuzz_files --only {name} --replay {seed}")
        raise
