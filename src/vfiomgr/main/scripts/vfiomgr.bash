# bash completion of vfiomgr.
#
# vfiomgr is given the line up to the cursor. Its answers are a line each: `plain,TEXT` is a
# candidate, quoted as the line needs it and without what stands before the last character of
# COMP_WORDBREAKS (`0000:`), which bash does not replace; `file,` and `dir,` ask for paths.

_vfiomgr_completion() {
    local line has_files=
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            plain,*) COMPREPLY+=("${line#plain,}") ;;
            file,*) has_files=1 ;;
            dir,*) compopt -o dirnames ;;
        esac
    done < <(
        env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
            _VFIOMGR_COMPLETE=bash_complete "$1" 2>/dev/null
    )
    if [[ $has_files ]]; then
        # Names beside files (a domain, or its XML in a file) are quoted already.
        if [[ ${COMPREPLY+set} ]]; then
            while IFS= read -r line; do
                COMPREPLY+=("$(printf %q "$line")")
            done < <(compgen -f -- "$2")
        else
            compopt -o default
        fi
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/=,:] ]]; then
        compopt -o nospace
    fi
    return 0
}

complete -o nosort -F _vfiomgr_completion vfiomgr
