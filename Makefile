# Every target builds and uses .venv in this folder.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: typing
typing:
	@mkdir -p .typing/moebus
	@for d in schemas observability broker engine producers consumers cli; do ln -sfn ../../$$d .typing/moebus/$$d; done
