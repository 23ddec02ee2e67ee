//! What a client asks a Kafka broker for, told from the bytes that it sends.

/// A kind of request, by its number in Kafka's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Produce = 0,
    Metadata = 3,
    InitProducerId = 22,
}

/// One connection's bytes, cut into requests: a length of four bytes, then the kind in two.
#[derive(Default)]
pub(super) struct Requests {
    head: Vec<u8>,
    rest: usize,
}

impl Requests {
    /// The kinds of the requests whose head ends in these bytes.
    pub(super) fn kinds(&mut self, mut bytes: &[u8]) -> Vec<u16> {
        let mut kinds = Vec::new();
        loop {
            bytes = &bytes[take(&mut self.rest, bytes.len())..];
            let mut missing = 6 - self.head.len();
            let head = take(&mut missing, bytes.len());
            self.head.extend_from_slice(&bytes[..head]);
            bytes = &bytes[head..];
            let &[a, b, c, d, e, f] = &self.head[..] else { return kinds };
            kinds.push(u16::from_be_bytes([e, f]));
            self.rest = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_sub(2);
            self.head.clear();
        }
    }
}

/// Takes what there is of what is missing.
fn take(missing: &mut usize, there: usize) -> usize {
    let taken = there.min(*missing);
    *missing -= taken;
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_seen_however_they_are_cut() {
        let mut stream = Vec::new();
        for (kind, body) in [(3_u8, 0), (22, 1), (0, 300), (3, 7)] {
            stream.extend_from_slice(&u32::to_be_bytes(2 + body));
            stream.extend_from_slice(&[0, kind]);
            stream.extend(std::iter::repeat_n(3, body as usize));
        }
        for size in 1..=stream.len() {
            let mut requests = Requests::default();
            let kinds: Vec<u16> = stream.chunks(size).flat_map(|piece| requests.kinds(piece)).collect();
            assert_eq!(kinds, [3, 22, 0, 3], "in pieces of {size}");
        }
    }
}
