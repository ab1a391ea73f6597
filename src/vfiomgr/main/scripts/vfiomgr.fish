# fish completion of vfiomgr.
#
# vfiomgr is given the line up to the cursor. Its answers are a line each: `plain,TEXT<TAB>HELP` is
# a candidate, `file,` and `dir,` ask for paths. fish quotes candidates by itself.

function __vfiomgr_complete
    set -l line (commandline -cp | string collect)
    set -l typed (commandline -ct)
    set -l before (string match --regex -- '^--[^=]*=' $typed)
    set -l path (string replace --regex -- '^--[^=]*=' '' $typed)
    set -l program (commandline -opc | string match --invert --regex -- '^\w+=')[1]
    set -l answer (env COMP_WORDS="$line" _VFIOMGR_COMPLETE=fish_complete $program 2>/dev/null)
    for one in $answer
        set -l parts (string split -m 1 , -- $one)
        switch $parts[1]
            case plain
                printf '%s\n' $parts[2]
            case file
                printf '%s\n' "$before"(__fish_complete_path "$path")
            case dir
                printf '%s\n' "$before"(__fish_complete_directories "$path" '')
        end
    end
end

complete --command vfiomgr --keep-order --no-files --arguments '(__vfiomgr_complete)'
