"""What a worker looks at once the last bytes are on their way: whether its model still reads what they go into."""

import pytest
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.inference.worker.direct_receiver import _check_unchanged


def test_tensors_that_a_model_reads_instead_of_those_prepared_are_noticed() -> None:
    prepared = {name: torch.zeros(4) for name in ("a", "b")}
    _check_unchanged(prepared, dict(prepared))
    with pytest.raises(DirectFailed, match=r"expected the tensors from before the pause, 1 are others, e\.g\. b"):
        _check_unchanged(prepared, prepared | {"b": torch.zeros(4)})
    with pytest.raises(DirectFailed, match=r"expected the tensors from before the pause, 1 are others, e\.g\. c"):
        _check_unchanged(prepared, prepared | {"c": torch.zeros(4)})
    with pytest.raises(DirectFailed, match=r"expected the tensors from before the pause, 1 are others, e\.g\. b"):
        _check_unchanged(prepared, {"a": prepared["a"]})
