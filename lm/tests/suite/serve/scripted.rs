//! A server whose engine writes what a test says.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use candle_lm::chat::ChatTemplate;
use candle_lm::generate::Stop;
use candle_lm::serve::{
    QueueLimits, RequestError, RequestQueue, ServeRequest, ServeStatus, TokenConstraint, TokenEvent,
    TokenLogprob, TokenMask, WaitingRequest,
};
use candle_lm::tokens;
use lm::serve::{Access, Front, FrontOptions, ServeLimits, ServedModel};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

/// The most tokens of a text.
pub(super) const ROOM: usize = 2000;
/// Special tokens, and tags.
const ADDED: [(&str, bool); 7] = [
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("[TOOL_CALLS]", true),
    ("<think>", false),
    ("</think>", false),
    ("<tool_call>", false),
    ("</tool_call>", false),
];
pub(super) const VOCABULARY: usize = 256 + ADDED.len();
/// `<|im_end|>`.
pub(super) const END: u32 = 257;

/// A tokenizer of bytes with special tokens and tags.
pub(super) fn tokenizer() -> Tokenizer {
    let mut made: Value =
        serde_json::from_str(&tokens::of_bytes().unwrap().to_string(false).unwrap()).unwrap();
    let added = ADDED.iter().zip(256..).map(|((text, special), id)| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
    });
    made["added_tokens"] = added.collect();
    made.to_string().parse().unwrap()
}

/// A template of the families with tags: thoughts and tools.
pub(super) const TAGS: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %} <tool_call>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}";

/// What a text is to be.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) tokens: Vec<u32>,
    pub(super) stop: Stop,
    /// The time before each token.
    pub(super) pause: Duration,
    /// How much less probable each token is than the one before it.
    pub(super) fall: f32,
    pub(super) error: Option<RequestError>,
    /// The error comes before the text begins.
    pub(super) fails_first: bool,
}

impl Script {
    pub(super) fn text(text: &str) -> Self {
        Self::tokens(&tokens::encode_part(&TOKENIZER, text).unwrap())
    }

    pub(super) fn tokens(tokens: &[u32]) -> Self {
        Self {
            tokens: tokens.to_vec(),
            stop: Stop::End,
            pause: Duration::ZERO,
            fall: 0.0,
            error: None,
            fails_first: false,
        }
    }
}

pub(super) static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(tokenizer);

type Writer = Arc<dyn Fn(&ServeRequest) -> Script + Send + Sync>;

/// How a server is made.
pub(super) struct Setting {
    pub(super) template: Option<&'static str>,
    pub(super) access: Access,
    pub(super) limits: ServeLimits,
    pub(super) queue: QueueLimits,
    pub(super) slots: usize,
    pub(super) connections: usize,
    pub(super) drain: Duration,
    pub(super) is_loading: bool,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            template: Some(TAGS),
            access: Access::default(),
            limits: ServeLimits::default(),
            queue: QueueLimits::default(),
            slots: 8,
            connections: 64,
            drain: Duration::from_secs(5),
            is_loading: false,
        }
    }
}

/// A server with a scripted engine.
pub(super) struct ScriptedServer {
    pub(super) address: SocketAddr,
    pub(super) queue: RequestQueue,
    /// The signal to end.
    pub(super) stop: Arc<AtomicBool>,
    /// How many texts are being written.
    pub(super) running: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    engine: Option<JoinHandle<()>>,
    front: Option<Front>,
}

impl ScriptedServer {
    pub(super) fn start(writer: impl Fn(&ServeRequest) -> Script + Send + Sync + 'static) -> Self {
        Self::with(Setting::default(), writer)
    }

    /// A server that always writes this.
    pub(super) fn writing(text: &str) -> Self {
        let script = Script::text(text);
        Self::start(move |_| script.clone())
    }

    /// A server that writes what grammars allow, and the shortest of it.
    pub(super) fn constrained() -> Self {
        Self::start(|_| Script::tokens(&[]))
    }

    pub(super) fn with(
        setting: Setting,
        writer: impl Fn(&ServeRequest) -> Script + Send + Sync + 'static,
    ) -> Self {
        let template =
            setting.template.map(|source| ChatTemplate::new(source, "a test", Default::default()).unwrap());
        let model =
            ServedModel::of_parts("scripted", tokenizer(), template, VOCABULARY, &BTreeSet::from([END]));
        let queue = RequestQueue::new(setting.queue);
        let (stop, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let running = Arc::new(AtomicUsize::new(0));
        let options = FrontOptions {
            access: setting.access,
            limits: setting.limits,
            connections: setting.connections,
            drain: setting.drain,
            logs: false,
            spans: None,
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let front =
            Front::start(listener, Box::leak(Box::new(model)), queue.clone(), stop.clone(), options).unwrap();
        if !setting.is_loading {
            open(&queue, setting.slots);
        }
        let engine = Engine {
            queue: queue.clone(),
            running: running.clone(),
            over: over.clone(),
            slots: setting.slots,
            writer: Arc::new(writer),
        };
        let engine = thread::spawn(move || engine.run());
        Self {
            address: front.address(),
            queue,
            stop,
            running,
            over,
            engine: Some(engine),
            front: Some(front),
        }
    }

    /// Waits until no text is written any more.
    #[track_caller]
    pub(super) fn wait_idle(&self) {
        let until = Instant::now() + Duration::from_secs(5);
        while self.running.load(Ordering::SeqCst) > 0 || self.queue.status().waiting > 0 {
            assert!(Instant::now() < until, "{:?}", self.queue.status());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends as the program does when its engine has ended, and returns how long that took.
    pub(super) fn finish(mut self) -> Duration {
        let began = Instant::now();
        self.engine.take().unwrap().join().unwrap();
        self.front.take().unwrap().finish();
        began.elapsed()
    }
}

impl Drop for ScriptedServer {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.engine.take().map(JoinHandle::join);
        self.front.take().into_iter().for_each(Front::finish);
    }
}

/// Says that the model is read.
pub(super) fn open(queue: &RequestQueue, slots: usize) {
    queue.open(ServeStatus { room: Some(ROOM), slots, ..ServeStatus::default() }, VOCABULARY);
}

struct Engine {
    queue: RequestQueue,
    running: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    slots: usize,
    writer: Writer,
}

impl Engine {
    fn run(self) {
        while !self.over.load(Ordering::SeqCst) {
            let is_free = self.running.load(Ordering::SeqCst) < self.slots;
            let Some(waiting) = is_free.then(|| self.queue.take(Instant::now())).flatten() else {
                let status = self.queue.status();
                if status.is_draining && status.waiting == 0 && self.running.load(Ordering::SeqCst) == 0 {
                    return;
                }
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            self.running.fetch_add(1, Ordering::SeqCst);
            let (writer, running, over) = (self.writer.clone(), self.running.clone(), self.over.clone());
            let queue = self.queue.clone();
            thread::spawn(move || {
                write(waiting, &writer, &queue, &over);
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
    }
}

/// The shortest text that a grammar allows, up to so many tokens: things that are closed as soon as they may be.
fn shortest(constraint: &mut dyn TokenConstraint, most: usize) -> Vec<u32> {
    let letters = "}]\",: 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-.{[";
    let order = tokens::encode_part(&TOKENIZER, letters).unwrap();
    let mut made = Vec::new();
    while made.len() < most {
        let mut mask = TokenMask::new(VOCABULARY);
        constraint.mask(&mut mask).unwrap();
        assert!((258..VOCABULARY as u32).all(|token| !mask.allows(token)), "a grammar has control tokens");
        let Some(&token) = order.iter().find(|&&token| mask.allows(token)) else { break };
        constraint.accept(token).unwrap();
        made.push(token);
    }
    made
}

/// Writes one text, until it is cancelled.
fn write(
    WaitingRequest { mut request, events, .. }: WaitingRequest,
    writer: &Writer,
    queue: &RequestQueue,
    over: &AtomicBool,
) {
    let mut script = writer(&request);
    if let Some(constraint) = &mut request.constraint {
        script.tokens = shortest(&mut **constraint, request.max_tokens);
    }
    let logprob = |token: u32| {
        let top =
            (0..request.logprobs.unwrap_or(0) as u32).map(|i| (token.wrapping_add(i) % 256, -0.5 - i as f32));
        TokenLogprob { logprob: if token == 33 { f32::NEG_INFINITY } else { -0.5 }, top: top.collect() }
    };
    if let Some(error) = script.error.clone().filter(|_| script.fails_first) {
        events.send(TokenEvent::Failed(error));
        return;
    }
    let prompt = request.prompt.iter().skip(1).map(|&token| logprob(token));
    events.send(TokenEvent::Begun {
        cached: request.prompt.len() / 2,
        admitted: Instant::now(),
        prompt_logprobs: if request.prompt_logprobs { prompt.collect() } else { Vec::new() },
    });
    for (written, &token) in script.tokens.iter().enumerate() {
        if written >= request.max_tokens {
            events.send(TokenEvent::Ended(Stop::Length));
            return;
        }
        let until = Instant::now() + script.pause;
        loop {
            if events.is_abandoned() || over.load(Ordering::SeqCst) {
                return;
            }
            if queue.is_stopped() {
                events.send(TokenEvent::Failed(RequestError::Stopped));
                return;
            }
            if Instant::now() >= until {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if request.stop_tokens.contains(&token) {
            if request.logprobs.is_some() {
                events.send(TokenEvent::EndToken { token, logprob: logprob(token) });
            }
            events.send(TokenEvent::Ended(Stop::End));
            return;
        }
        let mut logprob = request.logprobs.map(|_| logprob(token));
        if let Some(told) = &mut logprob {
            told.logprob -= script.fall * written as f32;
        }
        events.send(TokenEvent::Token { token, logprob, at: Instant::now() });
    }
    if request.max_tokens == 0 {
        events.send(TokenEvent::Ended(Stop::Length));
    }
    events.send(script.error.map_or(TokenEvent::Ended(script.stop), TokenEvent::Failed));
}
