# The commands of developers and of CI. They need make, git and Python 3.11 or newer.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PY := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without files of bytecode, each process would compile the tests and the packages again.
unexport PYTHONDONTWRITEBYTECODE
# On a shared machine, failed tests can be run again: make test RERUNS=1. The last line counts the reruns.
RERUNS ?= 0
PYTEST := $(PY) -m pytest -p no:cacheprovider --reruns $(RERUNS)
# make test ALL=1 COVERAGE=1 measures the branches of the product's code that these tests execute, and fails below the
# floor of pyproject.toml. The floor is raised when more is covered, and never lowered. It takes twice as long.
COVERED := $(if $(COVERAGE),--cov --cov-report=term:skip-covered)
# The tests of one file run in one worker, so that the processes of a module start once. tests/conftest.py sets the order.
# Tests wait for a part of their time, for threads, processes and leases, so there are three workers for two hardware
# threads.
PARALLEL = -n $(shell $(PY) -c 'import os; print(max(2, os.cpu_count() * 3 // 2))') --dist loadfile --no-loadscope-reorder

.PHONY: FORCE help run test test-services test-faults check lint types contracts format schema docs site bench bench-peers bench-check lock lock-images clean venv

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

RUNNING := $(VENV)/.running-$(or $(PORT),8000)

run: $(RUNNING) ## Run the whole service on 127.0.0.1:$PORT (8000), state under var/

# make does not pass on an interrupt that it alone receives. It deletes this target instead, and the program watches the file.
$(RUNNING): $(VENV)/.installed FORCE
	@touch $@
	@RUNNING_FILE=$@ $(PY) -m config.local
	@rm -f $@

FORCE:

test: $(VENV)/.installed-dev ## Run the fast tests, on SQLite and an embedded broker (ALL=1: also those with many runs)
	@FAST_TESTS=1 LONG_TESTS=$(ALL) $(PYTEST) -q $(PARALLEL) $(COVERED) -m "not services and not faults and not slow"

test-services: $(VENV)/.installed-dev ## Run the tests on a temporary PostgreSQL and Redis-compatible server
	@$(PY) -m tests.stack.run_services $(PYTEST) -q $(PARALLEL) -m "not faults and not once"; rest=$$?; \
	$(MAKE) test-faults && exit $$rest

FAULTS := tests/faults tests/isolation
# Tests that measure time run after the others, in two workers, which mostly wait.
test-faults: $(VENV)/.installed-dev ## Run the tests that kill, stop and slow down real processes
	@$(PY) -m tests.stack.run_services $(PYTEST) -q $(PARALLEL) $(FAULTS) -m "faults and not alone" --durations=10; rest=$$?; \
	$(PY) -m tests.stack.run_services $(PYTEST) -q -n 2 --dist loadgroup $(FAULTS) -m "faults and alone" --durations=5 && exit $$rest

check: ## Check lint, types, import rules, migrations, settings, API schema, documentation
	@$(MAKE) -k -j 2 lint types contracts

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .

types: $(VENV)/.installed-dev
	@VAR_DIR=$(CHECK_VAR)/types $(VENV)/bin/mypy --no-error-summary

# Settings as in production; the values are examples.
CHECK_VAR := var/check
DEPLOYED = env VAR_DIR=$(CHECK_VAR) DEBUG=0 BASE_URL=https://service.example.org ALLOWED_HOSTS=service.example.org TRUST_FORWARDED_PROTO=1 TRUSTED_PROXIES=1 \
	SECRET_KEY="$$($(PY) -c 'import secrets; print(secrets.token_urlsafe(64))')" \
	ENCRYPTION_KEYS="$$($(PY) -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())')" \
	METRICS_TOKEN=made-up DATABASE_URL=postgres://service:secret@127.0.0.1:1/service REDIS_URL=rediss://broker.example.com:6379/0 \
	SESSION_ISSUER=https://id.example.com SESSION_AUDIENCE=agents SESSION_JWKS_URL=https://id.example.com/jwks

contracts: $(VENV)/.installed-dev
	@$(VENV)/bin/lint-imports --no-logo >$(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@VAR_DIR=$(CHECK_VAR) $(PY) manage.py check --fail-level WARNING
	@$(DEPLOYED) $(PY) manage.py check --deploy --fail-level WARNING
	@VAR_DIR=$(CHECK_VAR) $(PY) manage.py makemigrations --check --dry-run
	@VAR_DIR=$(CHECK_VAR) $(DOCUMENT) --validate --fail-on-warn --file $(CHECK_VAR)/openapi.json
	@cmp -s $(CHECK_VAR)/openapi.json docs/openapi.json || { echo "docs/openapi.json is stale: make schema" >&2; exit 1; }
	@$(MKDOCS) --site-dir $(CHECK_VAR)/site >$(VENV)/mkdocs.log 2>&1 || { cat $(VENV)/mkdocs.log; exit 1; }

DOCUMENT := BASE_URL=http://127.0.0.1:8000 $(PY) manage.py spectacular --format openapi-json

schema: $(VENV)/.installed-dev ## Generate docs/openapi.json
	@VAR_DIR=$(CHECK_VAR) $(DOCUMENT) --file docs/openapi.json

MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

site: $(VENV)/.installed-dev ## Build the documentation as a site, which the service then shows at /docs
	@$(MKDOCS)

docs: $(VENV)/.installed-dev ## Generate docs/settings.md
	@VAR_DIR=$(CHECK_VAR) $(PY) -m tests.documentation.settings_page

format: $(VENV)/.installed-dev ## Format the code
	@$(VENV)/bin/ruff check --quiet --fix-only .
	@$(VENV)/bin/ruff format --quiet .

bench: $(VENV)/.installed-dev ## Run the benchmarks of docs/benchmarks.md
	@$(PY) -m tests.stack.run_services $(PY) -m benchmarks

bench-peers: $(VENV)/.installed-dev ## Compare the service with other agent servers, installed under var/peers/ (OPTIONS="--help")
	@$(PY) -m benchmarks.peers $(OPTIONS)

bench-check: $(VENV)/.installed-dev ## Compare the ratios with benchmarks/kept.json (RENEW=1: keep the new ones)
	@$(PY) -m benchmarks.check $(if $(RENEW),--renew) $(OPTIONS)

# Each .in file names what the code uses; each .txt adds what those packages need, all with their hashes. The three agree.
LOCK := $(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-strip-extras --no-emit-index-url $(if $(UPGRADE),--upgrade)

lock: $(VENV)/.installed-dev ## Write requirements*.txt from requirements*.in (UPGRADE=1: with newer packages)
	@$(LOCK) -o requirements-dev.txt requirements-dev.in
	@$(LOCK) -c requirements-dev.txt -o requirements-observability.txt requirements-observability.in
	@$(LOCK) -c requirements-dev.txt -o requirements-docs.txt requirements-docs.in
	@$(LOCK) -c requirements-dev.txt -o requirements.txt requirements.in
	@$(LOCK) -o tests/clients/requirements.txt tests/clients/requirements.in
	@$(LOCK) -o benchmarks/pins/langgraph.txt benchmarks/pins/langgraph.in
	@$(subst 3.11,3.12,$(LOCK)) -o benchmarks/pins/aegra.txt benchmarks/pins/aegra.in

IMAGE := ^(FROM|    image:) ([a-z0-9./-]+:[A-Za-z0-9._-]+)(@sha256:[0-9a-f]+)?

lock-images: ## Write the digests of the images into Dockerfile and compose.yaml (needs docker and its registry)
	@for image in $$(sed -nE 's#$(IMAGE).*#\2#p' Dockerfile compose.yaml | sort -u); do \
		digest=$$(docker buildx imagetools inspect "$$image" --format '{{.Manifest.Digest}}') || exit 1; \
		for file in Dockerfile compose.yaml; do \
			sed -E "s#^(FROM|    image:) $$image(@sha256:[0-9a-f]+)?#\1 $$image@$$digest#" $$file > $$file.new && \
			cat $$file.new > $$file; rm -f $$file.new; \
		done; \
		echo "$$image@$$digest"; \
	done

clean: ## Remove the virtual environment and caches; keep var/ (your data)
	@rm -rf $(VENV) var/check .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .grimp_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the virtual environment -----------------------------------------------------------------------------------------
# --no-compile: Python compiles a module at its first import. Most modules of the packages are never imported.
# A Python is usable if it starts (shims of version managers may not), is new enough and can make virtual environments.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

venv: $(VENV)/.installed-dev

$(VENV)/.created:
	@if $(PY) -c '$(USABLE)' 2>/dev/null && $(PY) -m pip --version >/dev/null 2>&1; then touch $@; exit 0; fi; \
	for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
		if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
			echo "Making $(VENV) with $$("$$python" --version)"; \
			"$$python" -m venv --clear $(VENV) && touch $@ && exit 0; \
		fi; \
	done; \
	echo "Python 3.11 or newer, with its venv module, is needed; found: $$(python3 --version 2>&1 | head -n 1)." >&2; \
	echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1

$(VENV)/.installed: requirements.txt | $(VENV)/.created
	@echo "Installing the packages of requirements.txt (once; about a minute)"
	@$(PY) -m pip install --quiet --no-compile --require-hashes -r requirements.txt && touch $@

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt | $(VENV)/.created
	@echo "Installing the packages of requirements-dev.txt"
	@$(PY) -m pip install --quiet --no-compile --require-hashes -r requirements-dev.txt && touch $@ $(VENV)/.installed
