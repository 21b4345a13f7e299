"""Claims of adapters: one file, on the daemon's host alone, and what a model may be an adapter of."""

import json
from pathlib import Path

import pytest
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.publisher import ACTIVE, REJECTED, PublisherRecord
from resharder.server.state.errors import DaemonError, FailedPrecondition, InvalidArgument
from resharder.server.store.store import Store

from tests.support.store_versions import FILES
from tests.support.waits import completed

Q = "base_model.model.model.layers.0.self_attn.q_proj"
SPECS = [TensorSpec(f"{Q}.lora_A.weight", "F32", (4, 32)), TensorSpec(f"{Q}.lora_B.weight", "F32", (48, 4))]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


@pytest.fixture
def intake(tmp_path: Path) -> Intake:
    return Intake(Store(tmp_path / "store", shared=False))


def files(**more: object) -> dict[str, bytes]:
    return {"adapter_config.json": json.dumps(CONFIG | more).encode()}


def register(intake: Intake, publisher: PublisherRecord, specs: list[TensorSpec] = SPECS) -> PublisherRecord:
    boxes = pack((number, full_box(spec.shape), False) for number, spec in enumerate(specs))
    return intake.register_slot(publisher.name, 0, "0", specs, boxes)


def test_ranks_on_hosts_of_nodes_send_their_parts_of_an_adapter_to_the_daemon(intake: Intake) -> None:
    publisher = intake.create_publisher("lora", "job", 2, files(), base="policy")
    for rank, (number, spec) in enumerate(enumerate(SPECS)):
        publisher.hosts[rank] = f"node-{rank}"
        publisher.add_slot(rank, str(rank), [spec], pack([(0, full_box(spec.shape), False)]))
        assert number == rank
    checked = publisher.check()
    assert checked.assigned.homes == {}
    assert [file.path for file in checked.files] == ["adapter_model.safetensors"]
    own = PublisherRecord("own", "job", 1, 2)
    for rank, spec in enumerate(SPECS):
        own.hosts[rank] = f"node-{rank}"
        own.add_slot(rank, str(rank), [spec], pack([(0, full_box(spec.shape), False)]))
    assert len(own.check().assigned.homes) == 2, "a model of its own has homes there"


def test_a_version_of_an_adapter_has_base_and_base_version_over_a_restart(intake: Intake, tmp_path: Path) -> None:
    publisher = register(intake, intake.create_publisher("lora", "job", 1, files(), base="policy"))
    assert publisher.state == ACTIVE
    record = completed(intake.create_version, publisher.name, 0, 1, base_version=9)
    assert (record.base, record.base_version) == ("policy", 9)
    assert intake.store.reader.config("lora", record.number) == files()["adapter_config.json"]
    intake.abort_version("lora", record.number, record.epoch, "the test's")
    assert intake.store.catalogue.base("lora") is None, "no version was READY, so that the name is free"


@pytest.mark.parametrize(
    ("base", "given", "reason"),
    [
        ("policy", FILES, "MODEL_FILE"),
        ("../policy", files(), "MODEL_NAME"),
        ("lora", files(), "BASE"),
    ],
)
def test_claims_that_no_adapter_can_have_are_refused(intake: Intake, base: str, given: dict[str, bytes], reason: str) -> None:
    with pytest.raises(DaemonError) as error:
        intake.create_publisher("lora", "job", 1, given, base=base)
    assert error.value.reason == reason


def test_a_base_that_is_known_as_an_adapter_is_refused_before_either_has_a_version(intake: Intake) -> None:
    intake.create_publisher("lora", "job", 1, files(), base="policy")
    with pytest.raises(FailedPrecondition, match="the base 'lora' is an adapter of 'policy'"):
        intake.create_publisher("second", "other", 1, files(), base="lora")
    with pytest.raises(FailedPrecondition, match="'policy' is the base of 'lora', and cannot be an adapter itself"):
        intake.create_publisher("policy", "other", 1, files(), base="third")
    with pytest.raises(FailedPrecondition, match="job 'job' publishes an adapter of 'policy', this call an adapter of 'third'"):
        intake.create_publisher("lora", "job", 1, files(), base="third")
    intake.create_publisher("policy", "other", 1, FILES)


@pytest.mark.parametrize(
    "content", [b"[]", b"5", b'"peft_type"', b"{", b'{"peft_type":[]}', b'{"peft_type":"LORA","r":{}}', b"[" * 9999]
)
def test_a_config_that_is_none_rejects_the_publisher(intake: Intake, content: bytes) -> None:
    publisher = intake.create_publisher("lora", "job", 1, {"adapter_config.json": content}, base="policy")
    with pytest.raises(FailedPrecondition) as error:
        register(intake, publisher)
    assert error.value.reason == "LAYOUT_MISMATCH"
    assert publisher.state == REJECTED


def test_a_version_of_the_base_that_it_cannot_have_is_refused(intake: Intake) -> None:
    publisher = register(intake, intake.create_publisher("lora", "job", 1, files(), base="policy"))
    with pytest.raises(InvalidArgument, match="as base_version, got -1"):
        completed(intake.create_version, publisher.name, 0, 1, base_version=-1)
    own = intake.create_publisher("own", "job", 1, {"config.json": b"{}"})
    register(intake, own, [TensorSpec("w", "F32", (4,))])
    with pytest.raises(InvalidArgument, match="'own' has no base: leave base_version out"):
        completed(intake.create_version, own.name, 0, 1, base_version=1)
