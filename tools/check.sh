#!/usr/bin/env bash
# check.sh [ROOT]: the rules of the house that a compiler does not enforce. Prints each breach as "FILE:LINE: rule" and
# ends with 1 if there is any. ROOT (default: this repository) lets the tests show it a house with a fault.
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

MAX_LINES=1200
breaches=0
breach() { echo "$1"; breaches=$((breaches + 1)); }

mapfile -t sources < <(find src -type f \( -name '*.[ch]' -o -name '*.cu' \) | sort)
mapfile -t tests < <(find tests -type f \( -name '*.[ch]' -o -name '*.py' -o -name '*.sh' \) 2>/dev/null | sort)
mapfile -t scripts < <(find tools -type f 2>/dev/null | sort)

# What each room may include besides itself. cli reads models and drives the engine; it never sees a plan or a backend
# but through engine.h.
declare -A rooms=(
    [base]="" [model]="base" [text]="base" [plan]="base model" [backend]="base" [comm]="base backend"
    [engine]="base model plan backend comm" [serve]="base text engine" [cli]="base model text engine serve"
)
# Of the engine, only its door is open to the rooms above it.
private='_priv\.h$|_impl\.h$|/cpu_[^/]*\.h$'

room_of() { local rest=${1#src/}; echo "${rest%%/*}"; }

declare -A home
for f in "${sources[@]}"; do [[ $f == *.h ]] && home[$(basename "$f")]=$f; done

# ---- the arrows between rooms
for f in "${sources[@]}"; do
    room=$(room_of "$f")
    if [[ -z ${rooms[$room]+known} ]]; then breach "$f:1: no room is called $room"; continue; fi
    while IFS=: read -r line text; do
        header=$(sed -E 's/.*"([^"]*)".*/\1/' <<<"$text")
        target=${home[$(basename "$header")]:-}
        [[ $header == *.c ]] && breach "$f:$line: includes a .c file: $header"
        if [[ -z $target ]]; then breach "$f:$line: includes $header, which no room has"; continue; fi
        other=$(room_of "$target")
        [[ $other == "$room" ]] && continue
        [[ " ${rooms[$room]} " == *" $other "* ]] || breach "$f:$line: $room may not include $other ($header)"
        [[ $target =~ $private ]] && breach "$f:$line: $header is private to $other"
    done < <(grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "$f" || true)
done

# ---- size, names
declare -A seen
for f in "${sources[@]}" "${tests[@]}"; do
    n=$(wc -l <"$f")
    ((n <= MAX_LINES)) || breach "$f:$n: $n lines, at most $MAX_LINES"
    name=$(basename "$f")
    [[ -z ${seen[$name]:-} ]] || breach "$f:1: the name is taken by ${seen[$name]}"
    seen[$name]=$f
done

# grep_rule PATTERN WHY FILE...: every line that matches is a breach.
grep_rule() {
    local pattern=$1 why=$2 hit
    shift 2
    (($# > 0)) || return 0
    while IFS= read -r hit; do breach "$(cut -d: -f1,2 <<<"$hit"): $why"; done < <(grep -nHE -e "$pattern" "$@" || true)
}
# only FILE...: those among the sources that are not named; the exceptions of a rule.
without() { local f; for f in "${sources[@]}"; do [[ " $* " == *" $f "* ]] || echo "$f"; done; }

mapfile -t no_switch < <(without src/backend/backend.c src/comm/comm.c)
grep_rule '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif)\b.*\bWITH_' 'WITH_ switches stand in backend.c and comm.c only' \
    ${no_switch[@]+"${no_switch[@]}"}
mapfile -t no_environment < <(printf '%s\n' "${sources[@]}" | grep -v '^src/cli/' || true)
grep_rule '\b(secure_)?getenv[[:space:]]*\(' 'the environment is read in cli/ only' \
    ${no_environment[@]+"${no_environment[@]}"}
grep_rule '^[[:space:]]*#[[:space:]]*include[[:space:]]*"[^"]*\.c"' 'tests never include a .c file' \
    ${tests[@]+"${tests[@]}"}
# The brackets keep this line from matching itself.
grep_rule '\b([T]ODO|[F]IXME|[X]XX)\b' 'an open end: do it, or file it' \
    ${sources[@]+"${sources[@]}"} ${tests[@]+"${tests[@]}"} ${scripts[@]+"${scripts[@]}"}
((breaches == 0)) || { echo "check: $breaches breach(es) of the rules of the house"; exit 1; }
echo "check: ${#sources[@]} sources and ${#tests[@]} tests keep the rules of the house"
