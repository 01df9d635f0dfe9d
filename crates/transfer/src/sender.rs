//! The source's end: a [`Sender`].
//!
//! A task of its own keeps a connection to the destination. Requests wait in `pending` until they
//! are answered; on a new connection all of them are sent again, in their order.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;

use bdev::{CopyTarget, Error, ErrorKind, TargetStep};
use reactor::{
    Buf, Class, Closed, Core, Event, OneshotSender, OwnedTask, Slice, Socket, oneshot, timeout,
};

use crate::link::{Broken, Link, Received};
use crate::tls::Identity;
use crate::wire::{
    Belongings, Frame, Hello, Kind, Outcome, PIECE_BYTES_MAX, VERSION, Violation, Welcome, hash,
};

/// How long making a connection may take, to the destination's first answer.
const CONNECT_NS: u64 = 10_000_000_000;
/// The source asks whether anybody is there when it has heard nothing for so long, and gives the
/// connection up after so many times.
const PING_NS: u64 = 3_000_000_000;
const PINGS_MAX: u32 = 4;
/// Pauses between two attempts to connect, the first one and the longest.
const AGAIN_MIN_NS: u64 = 50_000_000;
const AGAIN_MAX_NS: u64 = 2_000_000_000;

/// Begins a connection to the destination.
pub type Dial = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Result<Socket, String>>>>>;

/// An answer.
struct Answer {
    outcome: Outcome,
    text: String,
}

/// A request that has not been answered.
struct Pending {
    frame: Frame,
    payload: Payload,
    answer: OneshotSender<Answer>,
}

enum Payload {
    Bytes(Vec<u8>),
    Data(Slice),
}

impl Pending {
    fn send(&self, link: &Link) {
        match &self.payload {
            Payload::Bytes(bytes) => link.send(self.frame, bytes),
            Payload::Data(data) => link.send_data(self.frame, data),
        }
    }
}

/// Sends a disk's data to another node; see the module text. Its connection ends with it.
pub struct Sender {
    inner: Rc<Inner>,
    task: RefCell<Option<OwnedTask<()>>>,
}

struct Inner {
    core: Core,
    hello: Hello,
    dial: Dial,
    /// Who this node is, and the name of the other one.
    identity: Option<(Identity, String)>,
    pending: RefCell<BTreeMap<u64, Pending>>,
    /// The number of the next request.
    next: Cell<u64>,
    link: RefCell<Option<Rc<Link>>>,
    welcome: RefCell<Option<Welcome>>,
    /// Why the destination does not take the disk.
    refused: RefCell<Option<String>>,
    /// Why there is no connection.
    broken: RefCell<Option<String>>,
    /// The disk may be the destination's.
    given: Cell<bool>,
    /// The destination was started again since.
    renewed: Cell<bool>,
    compares: Cell<bool>,
    sent_bytes: Cell<u64>,
    /// Notified after each change of the connection.
    changed: Event,
}

impl Sender {
    /// Begins to connect. `identity` is this node's, with the other node's name, for TLS.
    pub fn start(
        core: &Core,
        hello: Hello,
        dial: Dial,
        identity: Option<(Identity, String)>,
    ) -> Sender {
        let inner = Rc::new(Inner {
            core: core.clone(),
            given: Cell::new(hello.given),
            hello,
            dial,
            identity,
            pending: RefCell::default(),
            next: Cell::new(1),
            link: RefCell::default(),
            welcome: RefCell::default(),
            refused: RefCell::default(),
            broken: RefCell::default(),
            renewed: Cell::new(false),
            compares: Cell::new(false),
            sent_bytes: Cell::new(0),
            changed: Event::new(),
        });
        let running = inner.clone();
        let task = core.spawn(Class::Background, async move { running.run().await }).owned();
        Sender { inner, task: RefCell::new(Some(task)) }
    }

    /// The destination's answer to the first connection. Suspends until it has come or, unless it
    /// is `patient`, until the first attempt to connect has failed.
    ///
    /// # Errors
    /// Why the destination does not take the disk, or cannot be reached.
    pub async fn welcome(&self, patient: bool) -> Result<Welcome, String> {
        let inner = &self.inner;
        let known = || {
            if let Some(why) = &*inner.refused.borrow() {
                return Some(Err(why.clone()));
            }
            if let Some(welcome) = &*inner.welcome.borrow() {
                return Some(Ok(welcome.clone()));
            }
            inner.broken.borrow().clone().filter(|_| !patient).map(Err)
        };
        inner.changed.wait_for(known).await
    }

    /// Why there is no connection now, if that is known.
    pub fn broken(&self) -> Option<String> {
        self.inner.broken.borrow().clone()
    }

    /// Whether the destination has refused the disk for good: then no request succeeds any more.
    pub fn is_refused(&self) -> bool {
        self.inner.refused.borrow().is_some()
    }

    /// Suspends until the destination refuses the disk for good. Returns why.
    pub async fn refused(&self) -> String {
        self.inner.changed.wait_for(|| self.inner.refused.borrow().clone()).await
    }

    /// Bytes of data that were sent.
    pub fn sent_bytes(&self) -> u64 {
        self.inner.sent_bytes.get()
    }

    /// Whether the destination was started again since the last call of [`Sender::take_renewed`]:
    /// what was not durable there may be lost.
    pub fn is_renewed(&self) -> bool {
        self.inner.renewed.get()
    }

    /// The same, and forgets it.
    pub fn take_renewed(&self) -> bool {
        self.inner.renewed.take()
    }

    /// Sends checksums first, and data only where it differs; or all data.
    pub fn compare(&self, compares: bool) {
        self.inner.compares.set(compares);
    }

    /// Whether the disk is about to be given: then a destination that does not know the move,
    /// because its disk was attached anew, is not to take part in it any more.
    pub fn gives(&self, gives: bool) {
        self.inner.given.set(gives);
    }

    /// Gives the disk to the destination, which has all of it. Suspends.
    ///
    /// # Errors
    /// Why the destination does not take it.
    pub async fn own(&self, belongings: &Belongings) -> Result<(), String> {
        self.inner.given.set(true);
        let text = serde_json::to_vec(belongings).map_err(|error| error.to_string())?;
        self.inner.ask(Kind::Own, text).await.map(drop)
    }

    /// Takes the disk back. Returns false if the guest has begun to use it there. Suspends.
    ///
    /// # Errors
    /// Why the destination does not give it.
    pub async fn take_back(&self) -> Result<bool, String> {
        self.inner.given.set(true);
        let back = self.inner.ask(Kind::Return, Vec::new()).await? != Outcome::Begun;
        self.inner.given.set(!back);
        Ok(back)
    }

    /// Tells the destination that the disk stays where it is. Suspends.
    ///
    /// # Errors
    /// When it fails there.
    pub async fn abandon(&self) -> Result<(), String> {
        self.inner.ask(Kind::Abandon, Vec::new()).await.map(drop)
    }

    /// Ends the connection: no request succeeds any more.
    pub fn end(&self) {
        self.task.take();
        self.inner.link.take();
        self.inner.refuse("this node has ended it".to_owned());
    }
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sender({} requests not answered)", self.inner.pending.borrow().len())
    }
}

impl CopyTarget for Sender {
    fn is_far(&self) -> bool {
        true
    }

    fn write(&self, offset: u64, len: u64, buf: Buf) -> TargetStep<'_> {
        Box::pin(async move {
            debug_assert!(len <= u64::from(PIECE_BYTES_MAX));
            let data = Slice::new(buf.share(), 0..len as usize);
            if self.inner.compares.get() {
                let hash = Payload::Bytes(hash(&data).to_vec());
                if self.inner.done(Kind::Compare, offset, len, hash).await? == Outcome::Done {
                    return Ok(());
                }
            }
            self.inner.done(Kind::Write, offset, len, Payload::Data(data)).await?;
            self.inner.sent_bytes.set(self.inner.sent_bytes.get() + len);
            Ok(())
        })
    }

    fn zero(&self, offset: u64, len: u64, _: Buf) -> TargetStep<'_> {
        self.clear(offset, len)
    }

    fn clear(&self, offset: u64, len: u64) -> TargetStep<'_> {
        let none = Payload::Bytes(Vec::new());
        Box::pin(async move { self.inner.done(Kind::Clear, offset, len, none).await.map(drop) })
    }

    fn flush(&self) -> TargetStep<'_> {
        let none = Payload::Bytes(Vec::new());
        Box::pin(async move { self.inner.done(Kind::Flush, 0, 0, none).await.map(drop) })
    }
}

impl Inner {
    /// A request and its answer.
    async fn request(&self, kind: Kind, offset: u64, len: u64, payload: Payload) -> Answer {
        let refused = |text: String| Answer { outcome: Outcome::Failed, text };
        if let Some(why) = &*self.refused.borrow() {
            return refused(why.clone());
        }
        let id = self.next.replace(self.next.get() + 1);
        let frame = Frame { offset, len, ..Frame::new(kind, id) };
        let (answer, answered) = oneshot();
        let pending = Pending { frame, payload, answer };
        if let Some(link) = &*self.link.borrow() {
            pending.send(link);
        }
        self.pending.borrow_mut().insert(id, pending);
        match answered.await {
            Ok(answer) => answer,
            Err(Closed) => refused(self.refused.borrow().clone().unwrap_or_default()),
        }
    }

    /// A request for data, and its outcome if it has not failed.
    async fn done(
        &self,
        kind: Kind,
        offset: u64,
        len: u64,
        payload: Payload,
    ) -> Result<Outcome, Error> {
        let Answer { outcome, text } = self.request(kind, offset, len, payload).await;
        match outcome {
            Outcome::Failed | Outcome::Later => {
                Err(Error::new(ErrorKind::Io, format!("the destination: {text}")))
            }
            outcome => Ok(outcome),
        }
    }

    /// A request about the disk as a whole.
    async fn ask(&self, kind: Kind, payload: Vec<u8>) -> Result<Outcome, String> {
        let payload = Payload::Bytes(payload);
        let Answer { outcome, text } = self.request(kind, 0, 0, payload).await;
        match outcome {
            Outcome::Failed | Outcome::Later => Err(text),
            outcome => Ok(outcome),
        }
    }

    /// Lets all requests fail.
    fn refuse(&self, why: String) {
        self.broken.replace(Some(why.clone()));
        self.refused.replace(Some(why));
        // Whoever waits for an answer learns that none comes.
        drop(self.pending.take());
        self.changed.notify_all();
    }

    /// Keeps a connection, until the destination refuses.
    async fn run(self: Rc<Self>) {
        let mut again_ns = AGAIN_MIN_NS;
        loop {
            let began_ns = self.core.now_ns();
            let why = match timeout(&self.core, CONNECT_NS, self.connect()).await {
                Err(_) => "it does not answer".to_owned(),
                Ok(Err(Refusal::Later(why))) => why,
                Ok(Err(Refusal::Never(why))) => return self.refuse(why),
                Ok(Ok(link)) => {
                    let why = self.serve(&link).await.to_string();
                    link.close();
                    why
                }
            };
            self.link.take();
            tracing::debug!(disk = self.hello.disk, "no connection to the destination: {why}");
            self.broken.replace(Some(why));
            self.changed.notify_all();
            if self.core.now_ns() > began_ns + CONNECT_NS {
                again_ns = AGAIN_MIN_NS;
            }
            self.core.sleep_ns(again_ns).await;
            again_ns = (2 * again_ns).min(AGAIN_MAX_NS);
        }
    }

    /// Makes a connection, and says hello.
    async fn connect(&self) -> Result<Rc<Link>, Refusal> {
        let socket = (self.dial)().await.map_err(Refusal::Later)?;
        let tls = match &self.identity {
            None => None,
            Some((identity, host)) => Some(identity.client(host).map_err(Refusal::Never)?),
        };
        let link = Rc::new(Link::new(&self.core, socket, tls));
        let hello = Hello { given: self.given.get(), ..self.hello.clone() };
        let hello = serde_json::to_vec(&hello);
        let hello = hello.map_err(|error| Refusal::Never(error.to_string()))?;
        link.send(Frame::new(Kind::Hello, 0), &hello);
        let broken = |why: Broken| Refusal::Later(why.to_string());
        let Received { frame, payload, .. } = link.next(no_data).await.map_err(broken)?;
        let text = || String::from_utf8_lossy(&payload).into_owned();
        match frame.kind {
            Kind::Reply(Outcome::Done) if frame.id == 0 => {}
            Kind::Reply(Outcome::Later) => return Err(Refusal::Later(text())),
            Kind::Reply(Outcome::Failed) => return Err(Refusal::Never(text())),
            _ => return Err(broken(Violation::Order.into())),
        }
        let welcome = serde_json::from_slice::<Welcome>(&payload);
        let welcome = welcome.map_err(|_| broken(Violation::Text.into()))?;
        if welcome.version != VERSION {
            let what =
                format!("it speaks version {} of the protocol, not {VERSION}", welcome.version);
            return Err(Refusal::Never(what));
        }
        self.broken.take();
        let before = self.welcome.replace(Some(welcome.clone()));
        if before.is_some_and(|before| before.incarnation != welcome.incarnation) {
            self.renewed.set(true);
        }
        for pending in self.pending.borrow().values() {
            pending.send(&link);
        }
        self.link.replace(Some(link.clone()));
        self.changed.notify_all();
        Ok(link)
    }

    /// Takes answers, until the connection is lost.
    async fn serve(&self, link: &Rc<Link>) -> Broken {
        loop {
            let mut pings = 0;
            let received = {
                let mut next = pin!(link.next(no_data));
                loop {
                    match timeout(&self.core, PING_NS, next.as_mut()).await {
                        Ok(received) => break received,
                        Err(_) if pings == PINGS_MAX => {
                            return Broken::Io("it does not answer any more".to_owned());
                        }
                        Err(_) => {
                            pings += 1;
                            link.send(Frame::new(Kind::Ping, 0), &[]);
                        }
                    }
                }
            };
            let Received { frame, payload, .. } = match received {
                Ok(received) => received,
                Err(why) => return why,
            };
            let Kind::Reply(outcome) = frame.kind else { return Violation::Order.into() };
            // The answer to a ping has the number 0.
            let pending = self.pending.borrow_mut().remove(&frame.id);
            if let Some(Pending { answer, .. }) = pending {
                let text = String::from_utf8_lossy(&payload).into_owned();
                // Nobody may wait for it any more.
                let _ = answer.send(Answer { outcome, text });
            }
        }
    }
}

/// Why there is no connection.
enum Refusal {
    /// It is tried again.
    Later(String),
    Never(String),
}

/// The source gets no data.
async fn no_data(_: usize) -> Result<Buf, Broken> {
    Err(Violation::Order.into())
}
