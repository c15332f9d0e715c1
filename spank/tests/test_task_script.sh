#!/bin/sh
# The task script, given as $1, hands over arguments as they are, and says which node lacks the command.
set -eu
script=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/slurm-pathways" <<'END'
#!/bin/sh
for argument in "$@"; do printf '<%s>' "$argument"; done
env | grep -c SLURM_PATHWAYS_TASK || :
END
chmod +x "$folder/slurm-pathways"

fail() {
    echo "test_task_script: $1" >&2
    exit 1
}

wanted="<srun-task><--node-dir></run/a b><--><my prog><a  b><><--x='\$y'>0"
given=$(PATH="$folder:$PATH" SLURM_PATHWAYS_TASK_PROGRAM='my prog' SLURM_PATHWAYS_TASK_COMMAND=slurm-pathways \
    SLURM_PATHWAYS_TASK_NODE_DIR='/run/a b' "$script" 'a  b' '' "--x='\$y'")
[ "$given" = "$wanted" ] || fail "with a folder: $given"

given=$(SLURM_PATHWAYS_TASK_PROGRAM=-c SLURM_PATHWAYS_TASK_COMMAND="$folder/slurm-pathways" "$script")
[ "$given" = "<srun-task><--><-c>0" ] || fail "without a folder: $given"

code=0
given=$(SLURM_PATHWAYS_TASK_PROGRAM=x SLURM_PATHWAYS_TASK_COMMAND=no-such-command SLURMD_NODENAME=n7 "$script" 2>&1) || code=$?
[ "$code" = 127 ] || fail "exit code $code without the command"
case $given in
"pathways: node n7: no-such-command is not found here"*) ;;
*) fail "without the command: $given" ;;
esac

printf '#!/bin/sh\nkill -INT $$\necho went on\n' > "$folder/interrupted"
chmod +x "$folder/interrupted"
given=$(SLURM_PATHWAYS_TASK_PROGRAM=x SLURM_PATHWAYS_TASK_COMMAND="$folder/interrupted" "$script" 2>&1) || :
[ "$given" = "went on" ] || fail "Ctrl-C while it starts: $given"

code=0
given=$("$script" 2>&1) || code=$?
[ "$code" != 0 ] || fail "started by hand: it went on"
echo "task script: ok"
