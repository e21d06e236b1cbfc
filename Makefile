# `make demo` and `make test` set up what they need on a bare machine; a second run installs nothing.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.swift-recovery-installed
DEMO := $(VENV)/.swift-recovery-for-the-demo
ETCD := $(VENV)/.etcd-looked-for
EXTRAS := all,test,dev,docs
FAULTS ?= 60
PARALLEL ?= 2
SEED ?= 1
export OMP_NUM_THREADS ?= 1
# Else each of the many processes of a test run compiles the packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test nightly matrix lint format docs dist soak bench bench-docs clean

help:
	@echo "make demo    train a small GPT-2 twice, with and without faults, and compare the results"
	@echo "make test    linters, type checker and tests, PARALLEL=$(PARALLEL) at once"
	@echo "make nightly longer tests, which make test leaves out, PARALLEL=$(PARALLEL) at once"
	@echo "make matrix  a part of the tests with each version of torch and Python (hours, 20 GB); results in docs/design"
	@echo "make lint    linters and type checker only"
	@echo "make docs    the documentation as a site, in runs/site; a broken link is an error"
	@echo "make dist    source distribution and wheel, checked: a job runs from the wheel, in a new environment, and loses a worker"
	@echo "make soak    FAULTS=$(FAULTS) random faults, drawn from SEED=$(SEED), as many in pipelines, FSDP2, HSDP, ZeRO-3, and with bits that flip"
	@echo "make bench   all benchmarks, about five minutes each; rows in runs/bench/; SIZE=--quick, SIZE=--full"
	@echo "make bench-docs  the tables in docs/benchmarks.md, with the rows in runs/bench/"
	@echo "make clean   remove what was built, keep the sources"

setup: $(STAMP)

# torch comes first and alone: other packages then find it and do not choose one of their own.
define INSTALL
@test -x $(PY) || $(PYTHON) -m venv $(VENV)
$(PY) -m pip install --disable-pip-version-check "torch==2.13.0"
$(PY) -m pip install --disable-pip-version-check -e ".[$(1)]"
@touch $@
endef

$(STAMP): pyproject.toml
	$(call INSTALL,$(EXTRAS))

# Without linters, tests and documentation.
$(DEMO): pyproject.toml
	$(call INSTALL,all)

# Tests of the rendezvous over etcd need one. Where there is none, Debian's is unpacked into $(VENV): nothing is installed
# and no service is started. Without it those tests are skipped.
$(ETCD): | $(STAMP)
	@command -v etcd > /dev/null || { mkdir -p $(VENV)/etcd && cd $(VENV)/etcd && { \
	  get() { timeout 60 apt-get -q -o Acquire::http::Timeout=10 -o Acquire::Retries=0 "$$@"; }; \
	  { get download etcd-server || { get update && get download etcd-server; }; } && \
	  dpkg -x etcd-server_*.deb . && ln -sf ../etcd/usr/bin/etcd ../bin/etcd; } > log 2>&1; } || \
	  echo "there is no etcd here: the tests that need one are skipped (why: $(VENV)/etcd/log)"
	@touch $@

demo: $(or $(wildcard $(STAMP)),$(DEMO))
	$(PY) -m examples.demo

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint $(ETCD)
	$(PY) -m pytest -n $(PARALLEL) --dist worksteal

nightly: $(STAMP) $(ETCD)
	$(PY) -m pytest -m nightly -n $(PARALLEL) --dist worksteal

matrix: $(STAMP)
	$(PY) tests/matrix --parallel $(PARALLEL)

docs: $(STAMP)
	$(PY) -m docs.tools.errors
	$(PY) -m docs.tools.figures
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

dist: $(STAMP)
	$(PY) -m pip install --disable-pip-version-check -e ".[release]"
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) -m twine check --strict dist/*
	SWIFT_TEST_WHEEL="$$(ls $(CURDIR)/dist/*.whl)" $(PY) -m pytest tests/test_installed.py

soak: $(STAMP)
	$(PY) -m tests.support.soak --faults $(FAULTS) --seed $(SEED)
	$(PY) -m tests.support.soak --faults $(FAULTS) --seed $(SEED) --model pipelines
	$(PY) -m tests.support.soak --faults $(FAULTS) --seed $(SEED) --model fsdp2
	$(PY) -m tests.support.soak --faults $(FAULTS) --seed $(SEED) --model hsdp
	$(PY) -m tests.support.soak --faults $(FAULTS) --seed $(SEED) --model zero3
	$(PY) -m tests.support.soak --faults $(FAULTS) --seed $(SEED) --model corrupted

BENCHMARKS := overhead recovery recovery_curves drain scale forming startup copies undo pipeline_overhead reroute_ddp \
  pipeline_recovery logging_tradeoff traces total_time checkpoint_policy planner reroute checkpoint_stall split_backward
# Empty, --quick or --full.
SIZE ?=

# A missed target does not keep the others from being measured.
.IGNORE: bench
bench: $(STAMP)
	for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name $(SIZE) --json runs/bench/$$name.json; done
	$(PY) -m benchmarks.total_time --simulated $(SIZE) --json runs/bench/total_time_simulated.json
	$(PY) -m benchmarks.plot runs/bench/*.json --to runs/bench

bench-docs: $(STAMP)
	$(PY) -m docs.tools.benchmarks $(wildcard runs/bench/*.json)

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
