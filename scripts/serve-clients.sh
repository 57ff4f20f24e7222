#!/usr/bin/env bash
# Runs real clients against `lm serve`: openai for Python and JavaScript, LangChain, LiteLLM, its page in Chromium, and schemathesis. Usage:
# scripts/serve-clients.sh [FLAG..]
#
# Needs network once, for pip, npm and SmolLM2. Clients are installed outside of the repository. Flags are those of `lm serve`, for example --tp 2.
# LM names a program that is built, and FUZZ=0 leaves schemathesis out. A text of the default length takes as long as the model does, so
# schemathesis sets no time. Chromium is used where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
model="$(scripts/smollm2.sh)"
[ -n "$model" ] || { echo "SKIPPED clients: SmolLM2 cannot be downloaded"; exit 0; }
tools="${XDG_CACHE_HOME:-$HOME/.cache}/candle-dist/serve-clients"
if [ ! -e "$tools/complete" ]; then
  rm -rf "$tools"
  if ! { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet openai==3.57.0 langchain-openai==1.7.4 litellm==1.110.2 schemathesis==4.32.5; }; then
    echo "SKIPPED clients: they cannot be installed"
    exit 0
  fi
  touch "$tools/complete"
fi
if command -v npm >/dev/null && [ ! -d "$tools/node_modules/openai" ]; then
  npm install --silent --prefix "$tools" openai@6.49.0 || echo "SKIPPED openai for JavaScript: npm cannot install it"
fi
[ -n "${LM:-}" ] || cargo build --release --quiet --bin lm
said="$(mktemp)"
"${LM:-${CARGO_TARGET_DIR:-target}/release/lm}" serve --port 0 --model "$model" --cache-tokens 1024 "$@" >"$said" 2>"$said.log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$said" "$said.log"' EXIT
for _ in $(seq 600); do
  grep -q "^Serving" "$said" && break
  kill -0 "$server" || { cat "$said.log"; exit 1; }
  sleep 0.1
done
address="$(sed -n 's/^Serving .* at \(http[^ ]*\): .*/\1/p' "$said")"
NODE_PATH="$tools/node_modules" "$tools/bin/python" benchmarks/serve_clients.py "$address"
[ "${FUZZ:-1}" = 0 ] || "$tools/bin/st" run "$address/openapi.json" --url "$address" --max-examples 25 --checks all --request-timeout 600 --max-response-time 600 --seed 1 --phases examples,coverage,fuzzing \
  --exclude-checks positive_data_acceptance
kill -TERM "$server"
wait "$server"
