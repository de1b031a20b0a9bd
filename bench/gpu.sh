#!/usr/bin/env bash
# Every test and benchmark that wants a GPU, within 10 minutes: see docs/contributors/gpu.md.
#   bench/gpu.sh             on a machine with a GPU; writes $OUT/gpu.json and gpu.log, the last line is JSON
#   bench/gpu.sh --seconds 200 --only hybrids,tiles   some steps, in less time
#   bench/gpu.sh --dry-run   the same way on the CPU with tiny shapes: shows that it runs
# Python is $PYTHON, else .venv, else python3. Wheels in .whl/ are installed beside its packages, without a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi

if compgen -G '.whl/*.whl' >/dev/null; then
  site=$(mktemp -d)
  if "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl; then
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  else
    echo "the wheels in .whl do not fit $python: it runs with the packages that it has" >&2
  fi
fi
export PYTHONPATH="$PWD/worker:$PWD${PYTHONPATH:+:$PYTHONPATH}"

exec "$python" -m bench.gpu.session "$@"
