#!/usr/bin/env bash
# Makes the environment VENV as LOCK says, with the packages of EXTRAS. Called by `make setup`, which sets the variables.
#
# A new environment is built beside the present one and takes its place once it is whole. This happens only if the
# contents of LOCK have changed, and never while a process runs from the present one. A link is replaced, not followed.
# With the word `clean` it only removes the environment, unless a process runs from it.
set -euo pipefail

new="$VENV.new" old="$VENV.old"
here="$(realpath -ms "$new")" there="$(realpath -ms "$VENV")"
exec 9>"$VENV.lock" && flock 9

digest() { sha256sum <"$1" | cut -d ' ' -f 1; }

install() { "$new/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }

stop_if_in_use() {
	[ -e "$VENV" ] || return 0
	for process in $({ grep -lsF -e "$there/" -e "$(realpath "$VENV")/" /proc/[0-9]*/maps /proc/[0-9]*/cmdline || true; } | cut -d / -f 3 | sort -un); do
		words="$(tr '\0' ' ' 2>/dev/null <"/proc/$process/cmdline" || true)"
		echo "error: $1, and process $process runs from $VENV: ${words:0:80}" >&2
		echo "Wait until it ends. Or build another environment beside it: make setup VENV=$VENV-2" >&2
		exit 1
	done
}

if [ "${1:-}" = clean ]; then
	stop_if_in_use "make clean removes the environment"
	rm -rf "$VENV" # of a link, only the link
	exit 0
fi

extras="$(printf '%s\n' $EXTRAS $(find "$VENV/" -maxdepth 1 -name '.extra-*' 2>/dev/null | sed 's/.*extra-//') | sort -u)"

if [ "$(cat "$VENV/.complete" 2>/dev/null)" != "$(digest "$LOCK")" ]; then
	[ -n "$PYTHON" ] || { echo "error: no Python 3.11, 3.12 or 3.13 found; install one, or set PYTHON=/path/to/python." >&2; exit 1; }
	stop_if_in_use "$LOCK has changed"
	echo "setting up $VENV from $LOCK with $PYTHON: about 2 GB, a few minutes"
	"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
		{ echo "error: PYTHON=$PYTHON is not Python 3.11, 3.12 or 3.13." >&2; exit 1; }
	rm -rf "$new"
	"$PYTHON" -m venv --prompt "$(basename "$VENV")" "$new"
	# pip installs one package after the other, so two of it share the work. No package needs another to be installed.
	# The torch index serves only torch, and only without local wheels. Other packages come from the usual index.
	cat "$LOCK" $(for extra in $extras; do echo "requirements/$extra.lock"; done) | sed -n '/^[A-Za-z0-9]/p' | sort -u >"$new/packages.txt"
	if [ "$LOCK" = requirements/cpu.lock ]; then
		grep '^torch==' "$new/packages.txt" >"$new/torch.txt"
		sed -i '/^torch==/d' "$new/packages.txt"
	fi
	awk 'NR % 2' "$new/packages.txt" >"$new/half.txt"
	awk 'NR % 2 == 0' "$new/packages.txt" >"$new/rest.txt"
	install --no-compile -r "$new/half.txt" & half=$!
	trap 'kill "$half" 2>/dev/null || true' EXIT
	if [ -e "$new/torch.txt" ]; then
		install --no-compile -r "$new/torch.txt" $([ -n "${PIP_FIND_LINKS:-}" ] || echo --index-url "$TORCH_INDEX")
	fi
	install --no-compile -r "$new/rest.txt"
	wait "$half"
	trap - EXIT
	rm "$new"/*.txt
	for extra in $extras; do digest "requirements/$extra.lock" >"$new/.extra-$extra"; done
	# Compile bytecode on all cores, because pip uses one. Some packages have files for other Pythons, which fail.
	# The tests of packages, a fifth of all code, are never imported.
	"$new/bin/python" -m compileall -qq -j 0 -x '/tests?/' "$new/lib" || true
	if [ -e pyproject.toml ]; then
		install --editable . # the project itself, in place, which adds the command dlrm
	fi
	grep -rlIF "$here" "$new/bin" "$new/pyvenv.cfg" | xargs -r sed -i "s|$here|$there|g" # programs name their Python
	digest "$LOCK" >"$new/.complete"
	stop_if_in_use "$LOCK has changed"
	rm -rf "$old"
	[ ! -e "$VENV" ] && [ ! -L "$VENV" ] || mv -T "$VENV" "$old"
	mv -T "$new" "$VENV"
	rm -rf "$old"
	echo "ready: $VENV"
fi

new="$VENV"
for extra in $extras; do
	[ "$(cat "$VENV/.extra-$extra" 2>/dev/null)" != "$(digest "requirements/$extra.lock")" ] || continue
	[ ! -e "$VENV/.extra-$extra" ] || stop_if_in_use "requirements/$extra.lock has changed"
	echo "adding $extra to $VENV"
	install -r "requirements/$extra.lock"
	digest "requirements/$extra.lock" >"$VENV/.extra-$extra"
done
echo "environment: $VENV is complete"
