# make demo and make test install what they need, and can be run any number of times.
PYTHON := .venv/bin/python
# Idle processes take over tests that others still have. Some tests wait for sockets and deadlines:
# one process more than there are processors keeps these busy.
UNIT_TESTS := $(PYTHON) -m pytest --numprocesses $(shell expr $$(nproc) + 1) --dist worksteal tests/unit
# pytest compiles its tests again in each run, by each process, unless it may keep them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast test-field test-platforms test-releases test-managers check lab lab-faults bench bench-lab docs package
.PHONY: format clean

setup:
	@tools/setup dev

demo:  ## the main job, told in the laboratory
	@tools/setup run
	@$(PYTHON) -m tests.lab demo

test: check  ## static checks, then all tests
	@status=0; VFIOMGR_TEST_TOTALS=$$(mktemp); export VFIOMGR_TEST_TOTALS; \
	$(UNIT_TESTS) || status=1; \
	$(PYTHON) -m compileall -q src tests || status=1; \
	$(PYTHON) -m pytest tests/field tests/integration tests/lab || status=1; \
	rm -f "$$VFIOMGR_TEST_TOTALS"; exit $$status

test-fast: check  ## static checks and unit tests: before each commit
	$(UNIT_TESTS)

test-field:  ## the answers about situations of public reports, by kind of cause
	@tools/setup dev
	@$(PYTHON) -m tests.field

# Each is a release of Debian, with its Python and its libvirt, or a Python of this machine.
RELEASES := trixie sid $(if $(shell python3.12 -V 2>/dev/null),python3.12)
test-releases:  ## unit tests and those with libvirt, with the Python and the libvirt of later releases
	@tools/setup dev
	@$(PYTHON) -m tests.releases $(RELEASES)

test-managers:  ## what `layout export --for nova` prints, read by nova (400 MB in the cache)
	@tools/setup dev
	@$(PYTHON) -m tests.managers

check: setup  ## static checks
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy --strict src tests benchmarks tools
	.venv/bin/lint-imports --config tools/imports.toml
	$(PYTHON) -m tools.imports

lab-faults:  ## what takes long: kills at every step, and the thorough tests of the laboratory
	@tools/setup dev
	@$(PYTHON) -m tests.lab deaths
	@VFIOMGR_LAB_EVERY_MOMENT=1 $(PYTHON) -m pytest tests/lab \
		-k "thorough or killed_at_every_step or stranded or where_the_journal_says"
	@VFIOMGR_LAB_EVERY_MOMENT=1 $(PYTHON) -m pytest tests/integration/test_node_soak.py \
		tests/integration/test_ansible_sanity.py tests/integration/test_ansible_hosts.py
	@VFIOMGR_LAB_EVERY_MOMENT=1 $(UNIT_TESTS) -k "Fault or death"

test-platforms:  ## all laboratory tests on Debian 12, 13 and sid, and those of IOMMUFD and ARM; hours
	@tools/setup dev
	@status=0; \
	$(PYTHON) -m pytest tests/lab --platform debian12 --platform debian13 --platform sid || status=1; \
	$(PYTHON) -m pytest tests/lab/test_cdev.py --platform debian13-iommufd --platform debian13-no-groups \
		--platform sid-iommufd || status=1; \
	$(PYTHON) -m pytest tests/lab/test_arm64.py --platform debian13-arm64 || status=1; \
	exit $$status

lab:  ## a root shell in the laboratory
	@tools/setup run
	@$(PYTHON) -m tests.lab shell

bench:  ## how fast it is, beside other tools, on this machine
	@tools/setup bench
	@$(PYTHON) -m benchmarks

bench-lab:  ## the same on a real kernel, in the laboratory
	@tools/setup bench
	@$(PYTHON) -m benchmarks --lab

docs:  ## the pictures of the documents, and what is generated: docs/reference, json.md, rules.md
	@tools/setup dev
	@$(PYTHON) -m tools.reference
	@$(PYTHON) -m tools.rules
	@$(PYTHON) -m tools.pictures

package:  ## a wheel, a .deb, an .rpm, a package for Arch and the Ansible collection, in dist/
	@tools/setup dev
	@$(PYTHON) -m tools.package

format:
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
