#!/bin/sh
# One node with SASL_SSL (own CA) on PORT, SASL_PLAINTEXT on PORT2, SSL on PORT3, and ACLs; otherwise as node.sh (ID 1).
# Clients: $DIR/ca.pem. Users admin (super user) and app (no rights until it gets an ACL) by SCRAM-SHA-512, passwords
# admin-secret and app-secret; by SCRAM-SHA-256 and PLAIN with passwords of their own, admin-secret-256 and so on. On PORT3 all may do all
# without a certificate; with $DIR/relay.pem and relay.key they are CN=relay (no rights).
set -eu
here=$(dirname "$0")
cport=${VOTERS##*:}
mkdir -p "$DIR"
cd "$DIR"
if [ ! -f keystore.pem ]; then
  openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=test-ca -keyout ca.key -out ca.pem 2>/dev/null
  openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout node.key -out node.csr 2>/dev/null
  printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\n' > san
  openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile san -out node.pem 2>/dev/null
  openssl pkcs8 -topk8 -nocrypt -in node.key | cat - node.pem ca.pem > keystore.pem
  openssl req -newkey rsa:2048 -nodes -subj /CN=relay -keyout relay.key -out relay.csr 2>/dev/null
  openssl x509 -req -in relay.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -out relay.pem 2>/dev/null
fi
scram=org.apache.kafka.common.security.scram.ScramLoginModule
plain=org.apache.kafka.common.security.plain.PlainLoginModule
users='user_admin="admin-secret-plain" user_app="app-secret-plain"'
cat > extra.properties <<X
listeners=SASL_SSL://127.0.0.1:$PORT,SASL_PLAINTEXT://127.0.0.1:$PORT2,SSL://127.0.0.1:$PORT3,CONTROLLER://127.0.0.1:$cport
advertised.listeners=SASL_SSL://127.0.0.1:$PORT,SASL_PLAINTEXT://127.0.0.1:$PORT2,SSL://127.0.0.1:$PORT3
inter.broker.listener.name=SASL_PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL
sasl.enabled.mechanisms=SCRAM-SHA-512,SCRAM-SHA-256,PLAIN
sasl.mechanism.inter.broker.protocol=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=$scram required;
listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config=$scram required;
listener.name.sasl_ssl.plain.sasl.jaas.config=$plain required $users;
listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config=$scram required username="admin" password="admin-secret";
listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config=$scram required;
listener.name.sasl_plaintext.plain.sasl.jaas.config=$plain required $users;
listener.name.ssl.ssl.client.auth=requested
ssl.keystore.type=PEM
ssl.keystore.location=$DIR/keystore.pem
ssl.truststore.type=PEM
ssl.truststore.location=$DIR/ca.pem
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:admin;User:ANONYMOUS
X
[ -z "${EXTRA:-}" ] || cat "$EXTRA" >> extra.properties
export EXTRA="$DIR/extra.properties"
for user in admin app; do
  for scram in 512=[name=$user,password=$user-secret] 256=[name=$user,password=$user-secret-256]; do
    FORMAT="${FORMAT:-} --add-scram SCRAM-SHA-$scram"
  done
done
export FORMAT
exec sh "$here/node.sh" 1
