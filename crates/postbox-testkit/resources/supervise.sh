# Runs one server and outlives its owner: supervise.sh FOLDER COMMAND.. The owner holds the other end of stdin. When
# that closes, whatever became of the owner, the server is killed and its folder removed.
# Verbs, one a line: "start" answers with the pid; "end SIGNAL" answers with the exit code; "kill" is "end KILL" with
# the server's own children, and waits for them too: PostgreSQL does not start while one still has its shared memory.
folder=$1
shift
pid=
trap : HUP INT TERM    # a signal ends `read` below, and with it the server; a trap is not inherited, "ignore" is

children() { cat "/proc/$pid/task/$pid/children" 2>/dev/null; }
gone() { case $(cut -d ' ' -f 3 "/proc/$1/stat" 2>/dev/null) in "" | Z | X) ;; *) false ;; esac }
end() {
  [ -n "$pid" ] || return 0
  kill -s "$@" $pid 2>/dev/null
  wait "$pid"
  code=$?
  pid=
}

while read -r verb signal; do
  case $verb in
    start) "$@" </dev/null >>"$folder/log" 2>&1 & pid=$!; echo "$pid" ;;
    end) end "$signal"; echo "$code" ;;
    kill)
      killed=$(children)
      end KILL $killed
      for child in $killed; do until gone "$child"; do sleep 0.01; done; done
      echo "$code" ;;
  esac
done
end KILL $(children)
# Children of a killed server may still write for a moment.
n=0
until rm -rf "$folder" 2>/dev/null || [ $n -ge 50 ]; do n=$((n + 1)); sleep 0.1; done
