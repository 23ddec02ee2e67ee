#!/bin/sh
# One KRaft node in the foreground (exec: the child's pid is the broker's): node.sh ID, with
# LIB (the jars), DIR (this node's own folder), PORT, and VOTERS "1@127.0.0.1:CPORT[,2@...]" (the same text for every node).
# Optional: JVM (its options; quick to start by default), CLUSTER (22 characters, the same for every node), EXTRA (a file of properties that override), FORMAT (more
# arguments to format, such as --add-scram). sasl.sh makes both for a node with TLS, SCRAM and ACLs.
set -euf
id=$1
cport=$(printf '%s' "$VOTERS" | tr ',' '\n' | sed -n "s/^$id@.*://p")
case $VOTERS in *,*) n=3 ;; *) n=1 ;; esac            # replicas
mkdir -p "$DIR"
if [ ! -f "$DIR/data/meta.properties" ]; then
  cat > "$DIR/server.properties" <<X
process.roles=broker,controller
node.id=$id
controller.quorum.voters=$VOTERS
listeners=PLAINTEXT://127.0.0.1:$PORT,CONTROLLER://127.0.0.1:$cport
advertised.listeners=PLAINTEXT://127.0.0.1:$PORT
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=$DIR/data
num.partitions=3
default.replication.factor=$n
min.insync.replicas=$(( (n + 1) / 2 ))
offsets.topic.replication.factor=$n
offsets.topic.num.partitions=3
transaction.state.log.replication.factor=$n
transaction.state.log.min.isr=$(( (n + 1) / 2 ))
transaction.state.log.num.partitions=3
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
controller.quorum.election.timeout.ms=500
controller.quorum.fetch.timeout.ms=1000
X
  [ -z "${EXTRA:-}" ] || cat "$EXTRA" >> "$DIR/server.properties"
  java -Xmx128m -XX:TieredStopAtLevel=1 -cp "$LIB/*" -Dorg.slf4j.simpleLogger.defaultLogLevel=warn \
    kafka.tools.StorageTool format -t "${CLUSTER:-cG9zdGJveC10ZXN0cy0xMg}" -c "$DIR/server.properties" ${FORMAT:-} > "$DIR/format.log" 2>&1
fi
exec java ${JVM:--Xmx384m -Xms64m -XX:+UseSerialGC -XX:TieredStopAtLevel=1} -cp "$LIB/*" \
  -Dorg.slf4j.simpleLogger.defaultLogLevel=warn kafka.Kafka "$DIR/server.properties"
