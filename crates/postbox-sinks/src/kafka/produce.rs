//! Messages into librdkafka's queue. The `send` of the crate rdkafka copies the topic's name, looks the topic up and asks
//! for the time with each message; a batch is a run of messages for few topics, so here that is done once a run.

#![allow(unsafe_code)] // in place of that `send`: a tenth of the relay's CPU

use postbox_engine::Message;
use rdkafka::bindings as native;
use rdkafka::error::IsError;
use rdkafka::producer::{Producer, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode as Code;
use std::ffi::CString;
use std::ptr::{NonNull, null_mut};
use std::time::SystemTime;

use super::session::Context;

/// A topic of a producer, for messages of now.
pub(super) struct Topic<'a> {
    producer: &'a ThreadedProducer<Context>,
    topic: NonNull<native::rd_kafka_topic_t>,
    /// Milliseconds since 1970.
    now: i64,
}

/// Header lists grow beyond that.
const HEADERS: usize = 8;

impl<'a> Topic<'a> {
    /// # Errors
    /// librdkafka cannot use the name.
    pub(super) fn new(producer: &'a ThreadedProducer<Context>, name: &str) -> Result<Topic<'a>, Code> {
        let name = CString::new(name).map_err(|_| Code::InvalidTopic)?;
        // SAFETY: the producer lives as long as its borrow, the name as long as the call, which copies it; without a
        // configuration the topic has the producer's.
        let topic = unsafe { native::rd_kafka_topic_new(producer.client().native_ptr(), name.as_ptr(), null_mut()) };
        let topic = NonNull::new(topic).ok_or(Code::InvalidTopic)?;
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis();
        Ok(Topic { producer, topic, now: i64::try_from(now).unwrap_or_default() })
    }

    /// Copies the message into the queue; never blocks.
    ///
    /// # Errors
    /// The code for which it was not taken: no report will come.
    pub(super) fn produce(&self, message: &Message, opaque: usize) -> Result<(), Code> {
        use native::rd_kafka_vtype_t::{
            RD_KAFKA_VTYPE_END, RD_KAFKA_VTYPE_HEADERS, RD_KAFKA_VTYPE_KEY, RD_KAFKA_VTYPE_MSGFLAGS,
            RD_KAFKA_VTYPE_OPAQUE, RD_KAFKA_VTYPE_RKT, RD_KAFKA_VTYPE_TIMESTAMP, RD_KAFKA_VTYPE_VALUE,
        };
        let key = message.event.aggregate_id().as_bytes();
        let body = message.body();
        // A tombstone has no pointer, an empty body has one.
        let (body, length) = body.map_or((std::ptr::null(), 0), |body| (body.as_ptr(), body.len()));
        // SAFETY: each tag is followed by the arguments of the types that librdkafka documents for it, END comes last.
        // Headers, key and body are copied before the calls return; the list is the queue's once the message is in it.
        let error = unsafe {
            let headers = native::rd_kafka_headers_new(HEADERS);
            for (name, value) in message.headers.raw() {
                native::rd_kafka_header_add(
                    headers,
                    name.as_ptr().cast(),
                    name.len().cast_signed(),
                    value.as_ptr().cast(),
                    value.len().cast_signed(),
                );
            }
            let error = native::rd_kafka_producev(
                self.producer.client().native_ptr(),
                RD_KAFKA_VTYPE_RKT,
                self.topic.as_ptr(),
                RD_KAFKA_VTYPE_MSGFLAGS,
                native::RD_KAFKA_MSG_F_COPY,
                RD_KAFKA_VTYPE_VALUE,
                body,
                length,
                RD_KAFKA_VTYPE_KEY,
                key.as_ptr(),
                key.len(),
                RD_KAFKA_VTYPE_OPAQUE,
                opaque,
                RD_KAFKA_VTYPE_TIMESTAMP,
                self.now,
                RD_KAFKA_VTYPE_HEADERS,
                headers,
                RD_KAFKA_VTYPE_END,
            );
            if error.is_error() {
                native::rd_kafka_headers_destroy(headers);
            }
            error
        };
        if error.is_error() { Err(error.into()) } else { Ok(()) }
    }
}

impl Drop for Topic<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made by `new` and is given back once; messages in the queue keep references of their own.
        unsafe { native::rd_kafka_topic_destroy(self.topic.as_ptr()) }
    }
}
