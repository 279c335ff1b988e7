#!/usr/bin/env bash
# The whole tool on the two small models that the repository ships; each command is printed, then run.
set -euo pipefail
cd "$(dirname "$0")/.."
MLB=${MLB:-.venv/bin/mlb}
OUT=demo-out
rm -rf "$OUT" && mkdir "$OUT"

show() {
    printf '\n$ mlb'
    printf ' %q' "$@"
    printf '\n'
    "$MLB" "$@"
}

show convert tests/data/demo -o $OUT/demo.mlb --wtype q8
show convert tests/data/demo -o $OUT/demo-q4.mlb --wtype q4 --q8-classes v,down
show inspect $OUT/demo-q4.mlb
show run $OUT/demo.mlb -p 'Tell me a story about a fox.' --seed 7 --stats
show run $OUT/demo.mlb -f README.md -n 0 --imatrix $OUT/demo.mli --ctx 256
show eval $OUT/demo.mlb $OUT/demo-q4.mlb -f tests/data/stories.txt --ctx 256
show pack-embed tests/data/student -o $OUT/student.bin --embedding-quant int4
show embed $OUT/student.bin 'Kahverengi valize ihtiyacım var.' \
    'I would like to have the brown suitcase, please.' 'What is the price of the golden flute?'
show validate $OUT
