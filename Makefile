# What a developer and the checks do, each as one command. Needs make, git and a Python of at least 3.11.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PY := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# On a machine that others use too, a failed test may be tried again: make test RERUNS=1. The closing line counts such tries.
RERUNS ?= 0
PYTEST := $(PY) -m pytest -p no:cacheprovider --reruns $(RERUNS)
# One file's tests stay together, so that the real processes of a module are started once; in the order of tests/conftest.py.
PARALLEL ?= -n auto --dist loadfile --no-loadscope-reorder

.PHONY: FORCE help run test test-services test-faults check lint types contracts format schema bench clean venv

help: ## What there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

RUNNING := $(VENV)/.running-$(or $(PORT),8000)

run: $(RUNNING) ## Run the whole service on 127.0.0.1:$PORT (8000), state under var/

# An interrupt that reaches make alone is not passed on; make deletes the target instead, and the program watches for that.
$(RUNNING): $(VENV)/.installed FORCE
	@RUNNING_FILE=$@ $(PY) -m config.laptop

FORCE:

test: $(VENV)/.installed-dev ## The fast tests: SQLite and a broker of their own
	@$(PYTEST) -q $(PARALLEL) -m "not services and not faults and not slow"

test-services: $(VENV)/.installed-dev ## Every test, on PostgreSQL and a Redis-compatible server, started and thrown away
	@$(PY) -m tests.stack.run_services $(PYTEST) -q $(PARALLEL) -m "not faults"; rest=$$?; \
	$(MAKE) test-faults && exit $$rest

# One after the other: each has several processes of its own to break, and some look at how long things take.
test-faults: $(VENV)/.installed-dev ## Those that kill, stop and starve real processes, one after the other
	@$(PY) -m tests.stack.run_services $(PYTEST) -q -m faults --durations=10

check: ## Lint, types, import rules, migrations, settings, API schema
	@$(MAKE) -k lint types contracts

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .

types: $(VENV)/.installed-dev
	@VAR_DIR=$(CHECK_VAR) $(VENV)/bin/mypy --no-error-summary

# Settings as in production; every value is made up.
CHECK_VAR := var/check
DEPLOYED = env VAR_DIR=$(CHECK_VAR) DEBUG=0 BASE_URL=https://agents.example.com ALLOWED_HOSTS=agents.example.com \
	SECRET_KEY="$$($(PY) -c 'import secrets; print(secrets.token_urlsafe(64))')" \
	ENCRYPTION_KEYS="$$($(PY) -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())')" \
	METRICS_TOKEN=made-up DATABASE_URL=postgres://service:secret@db.example.com:5432/service REDIS_URL=rediss://broker.example.com:6379/0 \
	SESSION_ISSUER=https://id.example.com SESSION_AUDIENCE=agents SESSION_JWKS_URL=https://id.example.com/jwks

contracts: $(VENV)/.installed-dev
	@$(VENV)/bin/lint-imports --no-logo >$(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@VAR_DIR=$(CHECK_VAR) $(PY) manage.py check --fail-level WARNING
	@$(DEPLOYED) $(PY) manage.py check --deploy --fail-level WARNING
	@VAR_DIR=$(CHECK_VAR) $(PY) manage.py makemigrations --check --dry-run
	@VAR_DIR=$(CHECK_VAR) $(PY) manage.py spectacular --validate --fail-on-warn --file /dev/null
	@VAR_DIR=$(CHECK_VAR) $(DOCUMENT) --file $(CHECK_VAR)/openapi.json; cmp -s $(CHECK_VAR)/openapi.json docs/openapi.json || { echo "docs/openapi.json is stale: make schema" >&2; exit 1; }

DOCUMENT := BASE_URL=http://127.0.0.1:8000 $(PY) manage.py spectacular --format openapi-json

schema: $(VENV)/.installed-dev ## Write docs/openapi.json anew
	@VAR_DIR=$(CHECK_VAR) $(DOCUMENT) --file docs/openapi.json

format: $(VENV)/.installed-dev ## Put the code in the house's format
	@$(VENV)/bin/ruff check --quiet --fix-only .
	@$(VENV)/bin/ruff format --quiet .

bench: $(VENV)/.installed-dev ## The README's figures, measured here
	@$(PY) -m tests.stack.run_services $(PY) -m benchmarks

clean: ## Remove the virtual environment and caches; var/ (your data) stays
	@rm -rf $(VENV) var/check .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .grimp_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the virtual environment -----------------------------------------------------------------------------------------
# Modules are compiled when first imported (--no-compile): most of what the packages bring never is.
# A Python counts if it runs (shims of version managers may not), is new enough and can make virtual environments.
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
	@echo "Installing what requirements.txt pins (once; about a minute)"
	@$(PY) -m pip install --quiet --no-compile -r requirements.txt && touch $@

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt | $(VENV)/.created
	@echo "Installing what requirements-dev.txt pins"
	@$(PY) -m pip install --quiet --no-compile -r requirements-dev.txt && touch $@ $(VENV)/.installed
