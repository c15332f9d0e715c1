#!/bin/sh
# Checks the runtime on this machine's first GPU, in under five minutes, and prints what goes into docs/hardware.md:
# the example, values against CPU, and what dispatch and transfers cost beside plain JAX on the same GPU.
#
#   tests/hardware/gpu.sh [--python PATH] [--cuda 12|13] [--platform cuda|cpu] [--quick] [--output FILE]
#
# --python: an interpreter that has the project with its extra [demo] and JAX's plugin for CUDA; default: a virtual
# environment in .venv-gpu, made from the package registry. --platform cpu and --quick try the script itself.
set -eu

project=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
python='' cuda=12 platform=cuda output='' quick=''
fail() {
    echo "gpu.sh: $1" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
        --python | --cuda | --platform | --output) [ $# -gt 1 ] || fail "$1 needs a value" ;;
    esac
    case $1 in
        --python) python=$2; shift 2 ;;
        --cuda) cuda=$2; shift 2 ;;
        --platform) platform=$2; shift 2 ;;
        --quick) quick=yes; shift ;;
        --output) output=$2; shift 2 ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) fail "unknown option $1; --help lists them" ;;
    esac
done
case $platform in cuda | cpu) ;; *) fail "--platform $platform: allowed are cuda and cpu" ;; esac
case $cuda in 12 | 13) ;; *) fail "--cuda $cuda: allowed are 12 and 13" ;; esac
case $output in '' | /*) ;; *) output=$PWD/$output ;; esac

if [ -z "$python" ]; then
    venv=$project/.venv-gpu
    if [ ! -x "$venv/bin/python" ]; then
        "$("$project/.ci/find-python")" -m venv "$venv"
    fi
    python=$venv/bin/python
    jax=jax
    [ "$platform" = cpu ] || jax="jax[cuda$cuda]"
    "$python" -m pip --disable-pip-version-check --quiet install "$jax" "$project[demo]"
fi
cd "$project"
exec "$python" tests/hardware/measure.py --platform "$platform" ${quick:+--quick} ${output:+--output "$output"}
