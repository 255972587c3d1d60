# Sourced by tests/run.sh after examples/environment.sh: the real SGLang, in every version named in $sglang_versions, on
# a CPU. One virtual environment, .venv-sglang, holds what they share, and a folder in it each of them; `use_sglang
# VERSION` makes `python` one that has that version.

sglang_versions=${SGLANG_VERSIONS:-"0.5.21 0.5.17"}
sglang_environment=$root/.venv-sglang

set_up_sglang() {
    local here=$root/tests/sglang_cpu stamp=$sglang_environment/.grpo-trainer wanted version
    wanted="$root $sglang_versions $(cat "$root/setup.py" "$here/requirements.txt" "$here/environment.sh" | cksum)"
    grep -qxF "$wanted" "$stamp" 2>/dev/null && return
    echo "Installing SGLang ($sglang_versions) for CPUs into $sglang_environment (once; a few minutes) ..."
    python -m venv "$sglang_environment" || fail "No virtual environment could be made in $sglang_environment."
    local pip=("$sglang_environment/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" --requirement "$here/requirements.txt" --editable "$root[test]" &&
        "${pip[@]}" --no-deps torchvision==0.28.0 ||
        fail "pip could not install what SGLang needs: see its message above."
    for version in $sglang_versions; do
        [ -d "$sglang_environment/sglang-$version/sglang" ] ||
            "${pip[@]}" --no-deps --target "$sglang_environment/sglang-$version" "sglang==$version" ||
            fail "pip could not install sglang $version: see its message above."
    done
    echo "$wanted" > "$stamp"
}

use_sglang() {
    set_up_sglang
    export PATH=$sglang_environment/bin:$PATH
    # The stand-ins beside this file let it be imported without CUDA; the processes it starts must find them too.
    export PYTHONPATH=$sglang_environment/sglang-$1:$root/tests/sglang_cpu
    export SGLANG_USE_CPU_ENGINE=1 GOMP_SPINCOUNT=0
}
