"""slime's weight updater `resharder`: two Megatron ranks, a real daemon and a real SGLang server.

slime is in no package index. With RESHARDER_TEST_SLIME, a checkout of it (`make test-sglang SLIME=…`), its own lines make the
updater and call it, and start the server. Read, and run so, with 0.3.1.
"""

from pathlib import Path
from typing import Any

import pytest
from resharder.client.errors import UsageError

from tests.sglang.slime_ranks import installed, options
from tests.support.daemon import Daemon
from tests.support.sglang_server import SGLangServer
from tests.support.tiny_hf import save_checkpoint, tiny_config
from tests.support.updating_ranks import expected, run


def test_each_update_of_slimes_actor_is_served_when_it_returns(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    with Daemon() as daemon:
        common: dict[str, str | None] = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy"}
        with SGLangServer(folder, env=common | {"RESHARDER_UNREACHABLE": "prefer"}, module="tests.sglang.slime_server") as server:
            assert run("tests.sglang.slime_ranks", folder, server, common) == expected(folder)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"colocate": True}, "--colocate"),
        ({"update_weight_mode": "delta"}, "--update-weight-mode"),
        ({"update_weight_transport": "disk"}, "--update-weight-transport"),
    ],
)
def test_a_job_that_would_make_another_updater_is_refused_by_its_option(given: dict[str, Any], named: str) -> None:
    args = options("")
    vars(args).update(given)
    with pytest.raises(UsageError, match=f"by itself with {named}"):
        installed(args)
