//! What an error code of Kafka means: whose fault it is, and what mends it. The whole table, in one place.

use postbox_engine::{SendError, SendErrorKind};
use rdkafka::types::RDKafkaErrorCode as Code;

/// Where the messages go, for texts.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) brokers: String,
    /// Who we are to them, as their ACLs write it.
    pub(super) principal: String,
}

/// What else an answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Also {
    Nothing,
    /// The topic takes nothing now; do not ask again for each event.
    TopicRefused,
    /// Brokers refuse a whole batch for the sake of one message. Send one by one to find it.
    Isolate,
}

impl Place {
    /// The answer to a message. `alone`: it shared its batch with no other. `ended`: why the session took no more.
    pub(super) fn answer(&self, code: Code, topic: &str, alone: bool, ended: Option<&str>) -> (SendError, Also) {
        use SendErrorKind::{Failed, Rejected, Unavailable, Unknown};
        let say = |kind, text: String| SendError::new(kind, text);
        match code {
            Code::MessageSizeTooLarge | Code::MessageBatchTooLarge if alone => {
                let text = format!(
                    "topic {topic} refused the message as too large; raise its max.message.bytes (kafka-configs \
                     --bootstrap-server {} --alter --topic {topic} --add-config max.message.bytes=N) and send the event again as docs/guide/mending.md says",
                    self.brokers
                );
                (say(Rejected, text), Also::Nothing)
            }
            Code::InvalidRecord
            | Code::InvalidTimestamp
            | Code::PolicyViolation
            | Code::UnsupportedForMessageFormat
                if alone =>
            {
                (say(Rejected, format!("topic {topic} refused the message: {code}")), Also::Nothing)
            }
            Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidRecord
            | Code::InvalidTimestamp
            | Code::PolicyViolation
            | Code::UnsupportedForMessageFormat
            | Code::InvalidDifferentRecord => {
                let text = format!("topic {topic} refused a batch: {code}; its messages go one by one now");
                (say(Unavailable, text), Also::Isolate)
            }
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => {
                (say(Failed, self.missing(topic)), Also::TopicRefused)
            }
            Code::TopicAuthorizationFailed => (say(Failed, self.forbidden(topic)), Also::TopicRefused),
            Code::InvalidTopic => (say(Rejected, format!("topic {topic}: brokers refuse the name")), Also::Nothing),
            Code::PurgeQueue => (
                say(Unavailable, ended.map_or_else(|| code.to_string(), |why| format!("not sent: {why}"))),
                Also::Nothing,
            ),
            Code::ClusterAuthorizationFailed | Code::NotEnoughReplicas | Code::BrokerTransportFailure => {
                (say(Unavailable, format!("Kafka at {}: {code}", self.brokers)), Also::Nothing)
            }
            // In flight when the session ended, an idempotence error, or a code of a later Kafka: it may have been
            // accepted.
            other => {
                let why = ended.map(|why| format!(" ({why})")).unwrap_or_default();
                (say(Unknown, format!("no answer from topic {topic}: {other}{why}")), Also::Nothing)
            }
        }
    }

    pub(super) fn missing(&self, topic: &str) -> String {
        format!(
            "topic {topic} does not exist; make it: kafka-topics --bootstrap-server {} --create --topic {topic} \
             --partitions 6 --replication-factor 3",
            self.brokers
        )
    }
    pub(super) fn forbidden(&self, topic: &str) -> String {
        format!(
            "not allowed to write to topic {topic}; allow it: kafka-acls --bootstrap-server {} --add \
             --allow-principal '{}' --producer --topic {topic}",
            self.brokers, self.principal
        )
    }
    pub(super) fn unreachable(&self, last: &str) -> String {
        let last = if last.is_empty() { "no broker answers" } else { last };
        format!(
            "Kafka at {} cannot be reached: {last}; is it running, are address and credentials right?",
            self.brokers
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SendErrorKind::{Failed, Rejected, Unavailable, Unknown};

    #[test]
    fn the_table() {
        let place = Place { brokers: "b:9092".into(), principal: "User:app".into() };
        let kind = |code, alone| {
            let (error, also) = place.answer(code, "shop", alone, Some("why"));
            assert!(
                error.message.contains("shop") || error.message.contains("b:9092") || error.message.contains("why")
            );
            (error.kind, also)
        };
        // A neighbour's fault never kills an event.
        for code in [Code::MessageSizeTooLarge, Code::InvalidRecord, Code::PolicyViolation] {
            assert_eq!(kind(code, false), (Unavailable, Also::Isolate));
            assert_eq!(kind(code, true), (Rejected, Also::Nothing));
        }
        assert_eq!(kind(Code::InvalidDifferentRecord, false), (Unavailable, Also::Isolate));
        assert_eq!(kind(Code::UnknownTopic, false), (Failed, Also::TopicRefused));
        assert_eq!(kind(Code::TopicAuthorizationFailed, false), (Failed, Also::TopicRefused));
        assert_eq!(kind(Code::InvalidTopic, false), (Rejected, Also::Nothing));
        for code in [Code::PurgeQueue, Code::ClusterAuthorizationFailed, Code::NotEnoughReplicas] {
            assert_eq!(kind(code, false), (Unavailable, Also::Nothing));
        }
        let unknown =
            [Code::PurgeInflight, Code::MessageTimedOut, Code::RequestTimedOut, Code::OutOfOrderSequenceNumber];
        for code in unknown.into_iter().chain([Code::Fatal, Code::GaplessGuarantee, Code::Unknown]) {
            assert_eq!(kind(code, false), (Unknown, Also::Nothing));
        }
    }

    #[test]
    fn what_an_operator_can_mend_names_the_command() {
        let place = Place { brokers: "b:9092".into(), principal: "User:app".into() };
        assert!(place.missing("shop").contains("kafka-topics --bootstrap-server b:9092 --create --topic shop"));
        assert!(place.forbidden("shop").contains("--allow-principal 'User:app' --producer --topic shop"));
    }
}
