#compdef vfiomgr
# zsh completion of vfiomgr.
#
# vfiomgr is given the line up to the cursor. Its answers are a line each: `plain,TEXT<TAB>HELP` is
# a candidate, `file,` and `dir,` ask for paths. zsh quotes candidates by itself.

_vfiomgr() {
    local line text has_files= has_directories= failed=1
    local -a answer texts shown openings
    line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$PREFIX"
    answer=("${(@f)$(
        env COMP_WORDS="$line" _VFIOMGR_COMPLETE=zsh_complete "${(Q)words[1]}" 2>/dev/null
    )}")
    [[ $PREFIX == --*=* ]] && compset -P 1 '*='
    for line in $answer; do
        case $line in
            plain,*/) openings+=("${line#plain,}") ;;
            plain,*)
                texts+=("${${line#plain,}%%$'\t'*}")
                shown+=("${line##*$'\t'}")
                [[ $line == *$'\t'* ]] || shown[-1]=
                ;;
            file,*) has_files=1 ;;
            dir,*) has_directories=1 ;;
        esac
    done
    if (( $#texts )); then
        local -i index width=0
        for text in $texts; do
            (( $#text > width )) && width=$#text
        done
        for (( index = 1; index <= $#texts; index++ )); do
            text="${(r:width:)texts[index]}  -- $shown[index]"
            [[ -n $shown[index] ]] || text=$texts[index]
            shown[index]=$text[1,COLUMNS-1]
        done
        if [[ $shown == $texts ]]; then
            compadd -V vfiomgr -a texts && failed=0
        else
            compadd -V vfiomgr -l -d shown -a texts && failed=0
        fi
    fi
    (( $#openings )) && compadd -V vfiomgr -S '' -a openings && failed=0
    [[ -n $has_files ]] && _files && failed=0
    [[ -n $has_directories ]] && _files -/ && failed=0
    return failed
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _vfiomgr "$@"  # from a directory of $fpath
else
    compdef _vfiomgr vfiomgr
fi
