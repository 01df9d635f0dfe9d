//! Bodies of the fuzz targets, callable from tests as well. Each panics when this crate breaks a
//! promise.

use crate::{DecodeError, Decoder, DecoderLimits, Limits, Parser, Progress, ProtocolError, Reply};

type Requests = (Vec<Vec<Vec<u8>>>, Option<ProtocolError>);
type Replies = (Vec<Reply>, Option<DecodeError>);

/// The request parser gives the same commands and the same error however the bytes are cut into
/// pieces.
pub fn request(data: &[u8]) {
    let Some((&seed, stream)) = data.split_first() else {
        return;
    };
    let whole = requests(stream, stream.len().max(1));
    let cut = requests(stream, 1 + usize::from(seed));
    assert_eq!(whole, cut);
    assert_eq!(whole, requests(stream, 1));
}

/// The reply decoder gives the same replies and the same error however the bytes are cut into
/// pieces.
pub fn reply(data: &[u8]) {
    let Some((&seed, stream)) = data.split_first() else {
        return;
    };
    let whole = replies(stream, stream.len().max(1));
    let cut = replies(stream, 1 + usize::from(seed));
    // Doubles may be NaN, which is not equal to itself.
    assert_eq!(format!("{whole:?}"), format!("{cut:?}"));
    assert_eq!(format!("{whole:?}"), format!("{:?}", replies(stream, 1)));
}

fn requests(stream: &[u8], step: usize) -> Requests {
    // Far below the defaults, so that inputs reach the limits.
    let limits =
        Limits { inline_bytes_max: 100, bulk_bytes_max: 300, args_max: 20, request_bytes_max: 600 };
    let mut parser = Parser::new(limits);
    let (mut buffer, mut found) = (Vec::new(), Vec::new());
    for chunk in stream.chunks(step) {
        buffer.extend_from_slice(chunk);
        loop {
            match parser.parse(&mut buffer) {
                Ok(Progress::Complete(length)) => {
                    assert!(
                        length > 0 && length <= buffer.len() && length <= limits.request_bytes_max
                    );
                    let args: Vec<Vec<u8>> =
                        parser.args().iter().map(|span| buffer[span.range()].to_vec()).collect();
                    assert!(args.len() <= limits.args_max.max(limits.inline_bytes_max));
                    assert!(parser.args().iter().all(|span| span.range().end <= length));
                    found.push(args);
                    buffer.drain(..length);
                }
                Ok(Progress::Incomplete(missing)) => {
                    assert!(missing > 0 && buffer.len() + missing <= limits.request_bytes_max);
                    break;
                }
                Err(error) => return (found, Some(error)),
            }
        }
    }
    (found, None)
}

fn replies(stream: &[u8], step: usize) -> Replies {
    let limits = DecoderLimits { bulk_bytes_max: 300, elements_max: 50, reply_bytes_max: 600 };
    let mut decoder = Decoder::new(limits);
    let mut found = Vec::new();
    for chunk in stream.chunks(step) {
        decoder.feed(chunk);
        loop {
            match decoder.next_reply() {
                Ok(Some(reply)) => found.push(reply),
                Ok(None) => break,
                Err(error) => return (found, Some(error)),
            }
        }
    }
    (found, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const REQUESTS: &[u8] = b"*3\r\n$4\r\nMGET\r\n$1\r\na\r\n$12\r\nhello\r\nworld\r\nset \"a\\x41\" 'b\\''\r\n\r\n*0\r\n*1\r\n$4\r\nPING\r\n";
    const REPLIES: &[u8] = b"+OK\r\n-ERR x\r\n:12\r\n$3\r\nabc\r\n$-1\r\n*2\r\n:1\r\n%1\r\n+a\r\n#t\r\n_\r\n,1.5\r\n(12\r\n=5\r\ntxt:a\r\n|1\r\n+a\r\n+b\r\n~1\r\n>1\r\n!1\r\nx\r\n";

    fn mutate(seed: &[u8], edits: &[(usize, u8, u8)]) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for &(at, kind, value) in edits {
            let at = at % bytes.len().max(1);
            match kind % 4 {
                0 if at < bytes.len() => bytes[at] = value,
                1 => bytes.insert(at, value),
                2 if at < bytes.len() => drop(bytes.remove(at)),
                _ => bytes.truncate(at),
            }
        }
        bytes
    }

    fn edits() -> impl Strategy<Value = Vec<(usize, u8, u8)>> {
        let significant = prop_oneof![
            any::<u8>(),
            proptest::sample::select(b"*$\r\n-+0123456789\"'\\x %~>|!=".to_vec())
        ];
        proptest::collection::vec((any::<usize>(), 0u8..8, significant), 1..6)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn damaged_requests_are_read_the_same_however_they_arrive(edits in edits(), step: u8) {
            let mut data = vec![step];
            data.extend(mutate(REQUESTS, &edits));
            request(&data);
        }

        #[test]
        fn damaged_replies_are_read_the_same_however_they_arrive(edits in edits(), step: u8) {
            let mut data = vec![step];
            data.extend(mutate(REPLIES, &edits));
            reply(&data);
        }

        #[test]
        fn noise_is_read_the_same_however_it_arrives(noise in proptest::collection::vec(any::<u8>(), 0..300)) {
            request(&noise);
            reply(&noise);
        }
    }
}
