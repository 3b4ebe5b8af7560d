#!/bin/sh
# count.sh LOG...: adds up the closing lines of ctest and pytest in these logs and prints "N passed, N failed, N skipped";
# ends with 1 where anything failed or nothing ran.
cat "$@" | awk '
    /tests passed, [0-9]+ tests failed out of [0-9]+/ { # ctest
        for (i = 1; i <= NF; i++) if ($i == "tests" && $(i + 1) == "failed") bad = $(i - 1)
        total = $NF
        failed += bad
        passed += total - bad
    }
    /^[0-9]+ (passed|failed|skipped|errors?|deselected|warnings?).* in [0-9.]+s/ { # pytest -q
        for (i = 1; i < NF; i++) {
            n = $i; word = $(i + 1); sub(/,$/, "", word)
            if (n !~ /^[0-9]+$/) continue
            if (word == "passed") passed += n
            if (word == "failed" || word ~ /^error/) failed += n
            if (word == "skipped") skipped += n
        }
    }
    END {
        printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed > 0 || passed == 0
    }'
