//! Questions and answers between two processes of a node, on one socket, in both directions at
//! once.
//!
//! A question is a JSON object. Its answer is the value that the asker expects, or an error with
//! its hint; descriptors may come along with both. One task of each side calls [`Channel::next`],
//! which returns the other side's questions and passes answers to their waiters. Messages are sent
//! whole, one after the other.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use reactor::{Core, Event, OneshotSender, oneshot};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind};
use crate::ipc::frames::{Frame, Frames, Limits};

/// Kinds of messages; the body begins with the question's number.
const QUESTION: u32 = 1;
const ANSWER: u32 = 2;
const REFUSAL: u32 = 3;
/// Length of the number in bytes.
const NUMBER_BYTES: usize = 8;

/// One end of a channel.
pub(crate) struct Channel {
    frames: Frames,
    sending: Cell<bool>,
    /// Nothing is sent for now.
    held: Cell<bool>,
    /// Notified when the next message may be sent.
    free: Event,
    broken: Cell<bool>,
    /// Nothing comes any more.
    over: Cell<bool>,
    asked: Cell<u64>,
    /// The askers, by the number of their question.
    waiting: RefCell<BTreeMap<u64, OneshotSender<Result<Answer, Error>>>>,
}

/// The answer to a question.
#[derive(Debug)]
pub(crate) struct Answer {
    pub body: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

/// A question of the other side.
#[derive(Debug)]
pub(crate) struct Question {
    number: u64,
    body: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

/// The encoding of an error.
#[derive(Serialize, Deserialize)]
struct Refusal {
    error: String,
    hint: Option<String>,
}

impl Refusal {
    fn encode(error: &Error) -> Result<Vec<u8>, String> {
        let hint = error.advice().map(str::to_owned);
        let refusal = Refusal { error: error.to_string(), hint };
        serde_json::to_vec(&refusal).map_err(|error| error.to_string())
    }
}

/// A decoded message.
enum Said {
    Question(Question),
    /// The answer to the question of this number.
    Answer(u64, Result<Answer, Error>),
}

impl Said {
    fn decode(frame: Frame) -> Result<Said, String> {
        let Frame { kind, body, descriptors } = frame;
        let number =
            body.first_chunk().map(|bytes: &[u8; NUMBER_BYTES]| u64::from_le_bytes(*bytes));
        let number = number.ok_or("a message is too short")?;
        let body = body[NUMBER_BYTES..].to_vec();
        Ok(match kind {
            QUESTION => Said::Question(Question { number, body, descriptors }),
            ANSWER => Said::Answer(number, Ok(Answer { body, descriptors })),
            REFUSAL => {
                let refusal: Refusal = read(&body).map_err(|error| error.to_string())?;
                let error = system(refusal.error);
                let error = match refusal.hint {
                    Some(hint) => error.hint(hint),
                    None => error,
                };
                Said::Answer(number, Err(error))
            }
            _ => return Err(format!("a message of unknown kind {kind}")),
        })
    }
}

/// The body of a message: the question's number and the text.
fn numbered(number: u64, text: &[u8]) -> Vec<u8> {
    [&number.to_le_bytes(), text].concat()
}

impl Answer {
    /// Decodes the answer.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        read(&self.body)
    }
}

impl Question {
    /// A question without a sender.
    #[cfg(test)]
    pub fn of(text: &str) -> Question {
        Question { number: 0, body: text.as_bytes().to_vec(), descriptors: Vec::new() }
    }

    /// The length of its text in bytes.
    pub fn length(&self) -> usize {
        self.body.len()
    }

    /// Decodes the question.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        read(&self.body)
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| system(format!("cannot read a message: {error}")))
}

fn system(what: impl Into<String>) -> Error {
    Error::new(Kind::System, what)
}

/// An asker; removed from the channel when this is dropped.
struct Asker<'a>(&'a Channel, u64);

impl Drop for Asker<'_> {
    fn drop(&mut self) {
        self.0.waiting.borrow_mut().remove(&self.1);
    }
}

/// A message that is being sent, and whether it is sent: after a partial message nothing can be
/// sent any more.
struct Sending<'a>(&'a Channel, bool);

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.0.sending.set(false);
        self.0.broken.set(self.0.broken.get() || !self.1);
        self.0.free.notify();
    }
}

impl Channel {
    /// Creates an end on a connected socket; received messages have these limits.
    pub fn from_fd(core: &Core, fd: OwnedFd, limits: Limits) -> std::io::Result<Channel> {
        Ok(Channel {
            frames: Frames::from_fd(core, fd, limits)?,
            sending: Cell::new(false),
            held: Cell::new(false),
            free: Event::new(),
            broken: Cell::new(false),
            over: Cell::new(false),
            // Start at random, because answers to a previous program may still come.
            asked: Cell::new(core.random_u64() >> 1),
            waiting: RefCell::default(),
        })
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// The other side's error, or that it has gone.
    pub async fn ask(
        &self,
        question: &impl Serialize,
        descriptors: &[OwnedFd],
    ) -> Result<Answer, Error> {
        let number = self.asked.get();
        self.asked.set(number + 1);
        let text = serde_json::to_vec(question).map_err(|error| system(error.to_string()))?;
        let (sender, answer) = oneshot();
        self.waiting.borrow_mut().insert(number, sender);
        let _asker = Asker(self, number);
        self.send(QUESTION, number, &text, descriptors).await.map_err(system)?;
        answer.await.unwrap_or_else(|_| Err(system("the other process has gone")))
    }

    /// Stops sending questions and answers, or continues.
    pub fn hold(&self, held: bool) {
        self.held.set(held);
        self.free.notify_all();
    }

    /// Whether an error of [`Channel::ask`] says that the other side has gone, rather than what it
    /// has answered.
    pub fn is_over(&self) -> bool {
        self.over.get() || self.broken.get()
    }

    /// The other side's next question.
    ///
    /// # Errors
    /// When the other side has gone, or sends an invalid message: nothing comes any more, and every
    /// waiter gets an error.
    pub async fn next(&self) -> Result<Question, String> {
        loop {
            let got = self.frames.receive().await.and_then(|frame| self.take(frame));
            match got {
                Ok(Some(question)) => return Ok(question),
                Ok(None) => {}
                Err(why) => {
                    self.over.set(true);
                    for (_, waiting) in self.waiting.take() {
                        // The asker may have given up.
                        let _ = waiting.send(Err(system(why.clone())));
                    }
                    return Err(why);
                }
            }
        }
    }

    fn take(&self, frame: Frame) -> Result<Option<Question>, String> {
        match Said::decode(frame)? {
            Said::Question(question) => Ok(Some(question)),
            Said::Answer(number, answer) => {
                // The asker may have given up.
                let asker = self.waiting.borrow_mut().remove(&number);
                let _ = asker.map(|asker| asker.send(answer));
                Ok(None)
            }
        }
    }

    /// Answers a question.
    ///
    /// # Errors
    /// When the other side has gone.
    pub async fn answer(
        &self,
        question: &Question,
        answer: Result<(Vec<u8>, Vec<OwnedFd>), Error>,
    ) -> Result<(), String> {
        let number = question.number;
        match answer {
            Ok((body, descriptors)) => self.send(ANSWER, number, &body, &descriptors).await,
            Err(error) => self.send(REFUSAL, number, &Refusal::encode(&error)?, &[]).await,
        }
    }

    async fn send(
        &self,
        kind: u32,
        number: u64,
        text: &[u8],
        descriptors: &[OwnedFd],
    ) -> Result<(), String> {
        self.free.wait_until(|| !self.held.get() && !self.sending.replace(true)).await;
        let body = numbered(number, text);
        let mut sending = Sending(self, false);
        if self.broken.get() {
            return Err("a message to the other process was cut short".to_owned());
        }
        let sent = self.frames.send(kind, &body, descriptors).await;
        sending.1 = sent.is_ok();
        sent
    }
}

/// An answer with a value.
pub(crate) fn json_answer(what: &impl Serialize) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
    let text = serde_json::to_vec(what).map_err(|error| system(error.to_string()))?;
    Ok((text, Vec::new()))
}

/// Decodes a frame, and its body by one of two functions; for fuzzers.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn fuzz(frame: Frame, question: impl Fn(&[u8]), answer: impl Fn(&[u8])) {
    let bytes = frame.body.clone();
    match Said::decode(frame) {
        Ok(Said::Question(Question { number, body, .. })) => {
            assert_eq!(numbered(number, &body), bytes);
            question(&body);
        }
        Ok(Said::Answer(number, Ok(Answer { body, .. }))) => {
            assert_eq!(numbered(number, &body), bytes);
            answer(&body);
        }
        Ok(Said::Answer(number, Err(error))) => {
            let body = numbered(number, &Refusal::encode(&error).expect("an error is JSON"));
            match Said::decode(Frame { kind: REFUSAL, body, descriptors: Vec::new() }) {
                Ok(Said::Answer(again, Err(same))) => {
                    assert_eq!((again, same.to_string()), (number, error.to_string()));
                    assert_eq!(same.advice(), error.advice());
                }
                _ => panic!("a refusal that is none any more"),
            }
        }
        Err(why) => assert!(!why.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::rc::Rc;

    use reactor::{Class, DriverKind, RuntimeConfig};

    use super::*;

    const LIMITS: Limits = Limits { body_bytes: 1000, descriptors: 1 };

    fn run(test: impl AsyncFn(Core) + Clone + Send + 'static) {
        let config = RuntimeConfig {
            processors: vec![reactor::processors()[0]],
            memory: 1 << 20,
            driver: DriverKind::Epoll,
            ..RuntimeConfig::default()
        };
        reactor::run(&config, move |core| {
            let test = test.clone();
            async move { test(core).await }
        })
        .unwrap();
    }

    #[test]
    fn both_sides_ask_at_once_and_each_gets_its_answers() {
        run(async |core| {
            let (here, there) = UnixStream::pair().unwrap();
            let ends = [here, there]
                .map(|end| Rc::new(Channel::from_fd(&core, end.into(), LIMITS).unwrap()));
            for end in ends.clone() {
                let answering = async move {
                    while let Ok(question) = end.next().await {
                        let answer = match question.read::<u32>() {
                            Ok(13) => Err(Error::new(Kind::Usage, "not 13").hint("try 14")),
                            Ok(number) => {
                                json_answer(&(number + 1)).map(|(text, _)| (text, question_fd()))
                            }
                            Err(error) => Err(error),
                        };
                        if end.answer(&question, answer).await.is_err() {
                            return;
                        }
                    }
                };
                core.spawn(Class::Control, answering);
            }
            for number in 0..100_u32 {
                for end in &ends {
                    let answer = end.ask(&number, &[]).await;
                    if number == 13 {
                        let error = answer.unwrap_err();
                        assert_eq!(error.to_string(), "not 13");
                        assert_eq!(error.advice(), Some("try 14"));
                    } else {
                        let answer = answer.unwrap();
                        assert_eq!(answer.read::<u32>().unwrap(), number + 1);
                        assert_eq!(answer.descriptors.len(), 1);
                        assert!(answer.read::<String>().is_err());
                    }
                }
            }
            assert!(ends.iter().all(|end| end.waiting.borrow().is_empty()));
        });
    }

    fn question_fd() -> Vec<OwnedFd> {
        vec![UnixStream::pair().unwrap().0.into()]
    }

    #[test]
    fn an_invalid_message_ends_the_channel() {
        let frame = |kind: u32, length: u32, descriptors: u32, body: &[u8]| {
            let numbers = [kind, length, descriptors].map(u32::to_le_bytes);
            [&numbers.concat(), body].concat()
        };
        let cases = [
            frame(QUESTION, 1001, 0, &[]),
            frame(QUESTION, u32::MAX, 0, &[]),
            frame(QUESTION, 8, 2, &[0; 8]),
            frame(QUESTION, 8, 1, &[0; 8]),
            frame(QUESTION, 7, 0, &[0; 7]),
            frame(9, 8, 0, &[0; 8]),
            frame(REFUSAL, 9, 0, &[b'x'; 9]),
            frame(ANSWER, 20, 0, &[0; 8]),
        ];
        run(async move |core| {
            for bytes in &cases {
                let (here, mut there) = UnixStream::pair().unwrap();
                let end = Rc::new(Channel::from_fd(&core, here.into(), LIMITS).unwrap());
                let asking = {
                    let end = end.clone();
                    core.spawn(Class::Control, async move { end.ask(&1, &[]).await })
                };
                core.sleep_ns(100_000).await;
                there.write_all(bytes).unwrap();
                drop(there);
                assert!(end.next().await.is_err());
                assert!(asking.await.is_err());
            }
            // An answer without a waiter is ignored.
            let (here, mut there) = UnixStream::pair().unwrap();
            let end = Channel::from_fd(&core, here.into(), LIMITS).unwrap();
            there.write_all(&frame(ANSWER, 8, 0, &77_u64.to_le_bytes())).unwrap();
            there.write_all(&frame(QUESTION, 9, 0, b"12345678\x37")).unwrap();
            assert_eq!(end.next().await.unwrap().read::<u32>().unwrap(), 7);
        });
    }
}
