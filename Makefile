.PHONY: run test lint docs

run:  ## the main job: an agent learns to use a tool
	rollouts run --env calculator --loss grpo

test:
	pytest

lint:
	ruff check
	ruff format --check
	mypy

docs:  ## the page that is made from the commands' own help, and the tests that hold the other pages
	python -m rollouts.cli.reference > docs/cli.md
	pytest -n 0 tests/test_docs.py tests/cli/test_reference.py
