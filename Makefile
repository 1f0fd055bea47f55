.PHONY: run test test-slow nightly test-templates test-adapters test-clients test-engines lint docs site

ADAPTERS ?= $(HOME)/.cache/rollouts/adapters
PYTHON_3_12 ?= python3.12

run:  ## the main job: an agent learns to use a tool
	rollouts run --env calculator --loss grpo

test:
	pytest

test-slow:  ## whole ways through the product, whose parts have tests in `make test`; a stage of CI
	pytest -m "slow and not engines and not adapters and not nightly"

nightly:  ## all of these, with every case of each sweep, and 300 examples of each property
	pytest -m "not engines and not adapters" --hypothesis-profile nightly

test-templates:  ## supervised rows and rollouts of 300 chat templates whose true spans are known
	python tests/chat/made_templates.py --count 300

test-adapters:  ## every environment of the upstream packages, which it installs, played beside upstream's own loop
	python -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/pip install -q -r requirements-adapters.txt
	python -m venv $(ADAPTERS)/mcp-1
	$(ADAPTERS)/mcp-1/bin/pip install -q "mcp==1.30.0" uvicorn
	python -m venv $(ADAPTERS)/openenv
	$(ADAPTERS)/openenv/bin/pip install -q openenv==0.10.0
	python -m venv $(ADAPTERS)/ors
	$(ADAPTERS)/ors/bin/pip install -q ors-sdk==0.1.0
	$(PYTHON_3_12) -m venv $(ADAPTERS)/nemo-gym
	$(ADAPTERS)/nemo-gym/bin/pip install -q nemo-gym==0.4.0
	$(PYTHON_3_12) -m venv $(ADAPTERS)/harbor
	$(ADAPTERS)/harbor/bin/pip install -q harbor==0.25.0
	ROLLOUTS_NEMO_GYM=$(ADAPTERS)/nemo-gym/bin/python ROLLOUTS_HARBOR=$(ADAPTERS)/harbor/bin/python \
	ROLLOUTS_MCP_1=$(ADAPTERS)/mcp-1/bin/python ROLLOUTS_ORS=$(ADAPTERS)/ors/bin/python \
	ROLLOUTS_OPENENV=$(ADAPTERS)/openenv/bin/python \
	  $(ADAPTERS)/bin/python -m pytest -n 0 -m "not engines" --equal-at-least 300 plugins tests/adapters
	set -e; for own in plugins/*/requirements-adapters.txt; do \
	  folder=$$(dirname $$own) && venv=$(ADAPTERS)/$$(basename $$folder); \
	  python -m venv $$venv && $$venv/bin/pip install -q -r $$own && $$venv/bin/python -m pytest -n 0 -m adapters $$folder; \
	done

test-clients:  ## agents of other packages, which it installs, play episodes at the address of a model
	python -m venv $(ADAPTERS)/clients
	$(ADAPTERS)/clients/bin/pip install -q -r requirements-clients.txt
	$(ADAPTERS)/clients/bin/python -m pytest -n 0 -m "not engines" tests/gateway/test_package_agents.py

test-engines:  ## against real vLLM and SGLang servers, each installed once into $$ROLLOUTS_ENGINES (about 3 GB each)
	pytest -n 0 -m engines tests/engines

lint:  ## style, types, and American spelling (the exceptions are in pyproject.toml)
	ruff check
	ruff format --check
	mypy
	codespell

docs:  ## generate docs/cli.md from the help of the commands, and test the documentation
	python scripts/cli_reference.py > docs/cli.md
	pytest -n 0 tests/test_docs.py tests/cli/test_reference.py

site:  ## build the documentation as a website in site/; a broken link is an error
	pip install -q -r requirements-docs.txt
	zensical build --strict
