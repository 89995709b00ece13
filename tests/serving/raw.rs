//! A minimal HTTP/2 client that writes frames itself, for client behavior that no HTTP/2 library allows. Request
//! headers are sent without compression. Response headers are not decoded; received frames are identified only by type
//! and flags.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Frame types.
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The setting that limits how many bytes may be sent on a stream (SETTINGS_INITIAL_WINDOW_SIZE).
const INITIAL_WINDOW_SIZE: u16 = 4;
/// The largest flow-control window.
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The initial flow-control window of a connection and, unless a setting changes it, of a stream.
const FIRST_WINDOW: u32 = 65_535;
/// Frame flags.
pub const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// A client connection.
pub struct Raw {
    stream: TcpStream,
    next: u32,
    /// The initial window of a new stream, from the server's latest known setting.
    window: u32,
    /// Names and values that each call has beside its own.
    headers: Vec<(&'static str, String)>,
}

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// Returns whether the frame ends its stream.
    pub fn ends(&self) -> bool {
        self.kind == RESET || (matches!(self.kind, DATA | HEADERS) && self.flags & END_STREAM != 0)
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Returns the HPACK header block of a gRPC call, with `more` headers.
fn block(path: &str, more: &[(&str, String)]) -> Vec<u8> {
    // Indexed fields `:method: POST` and `:scheme: http`, then literal names and values, each preceded by its length.
    let mut block = vec![0x83, 0x86];
    let own = [(":path", path), (":authority", "test"), ("content-type", "application/grpc"), ("te", "trailers")];
    for (name, value) in own.into_iter().chain(more.iter().map(|(name, value)| (*name, value.as_str()))) {
        block.extend([0, name.len() as u8]);
        block.extend(name.bytes());
        block.push(value.len() as u8);
        block.extend(value.bytes());
    }
    block
}

/// Returns a gRPC message with its five-byte prefix.
pub fn message(bytes: &[u8]) -> Vec<u8> {
    let mut framed = vec![0];
    framed.extend((bytes.len() as u32).to_be_bytes());
    framed.extend(bytes);
    framed
}

impl Raw {
    /// Connects to `http://HOST:PORT`. The flow-control windows for received data stay at the default of 64 KiB.
    pub async fn open(address: &str) -> Raw {
        let stream = TcpStream::connect(address.trim_start_matches("http://")).await.unwrap();
        let mut raw = Raw { stream, next: 1, window: FIRST_WINDOW, headers: Vec::new() };
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(frame(SETTINGS, 0, 0, &[]));
        raw.send(&bytes).await;
        raw
    }

    /// Connects with the largest flow-control windows for received data and a small receive buffer in this host's
    /// kernel, so that the server may send without limit but little of it is buffered here.
    pub async fn open_wide(address: &str) -> Raw {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let stream = socket.connect(address.trim_start_matches("http://").parse().unwrap()).await.unwrap();
        let mut raw = Raw { stream, next: 1, window: FIRST_WINDOW, headers: Vec::new() };
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let setting = [&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &LARGEST_WINDOW.to_be_bytes()].concat();
        bytes.extend(frame(SETTINGS, 0, 0, &setting));
        bytes.extend(frame(WINDOW_UPDATE, 0, 0, &(LARGEST_WINDOW - FIRST_WINDOW).to_be_bytes()));
        raw.send(&bytes).await;
        raw
    }

    /// Gives each call a token.
    pub fn with_token(self, token: &str) -> Raw {
        Raw { headers: vec![("authorization", format!("Bearer {token}"))], ..self }
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Reads frames until the server's SETTINGS frame, adopts its initial window and acknowledges it.
    pub async fn acknowledge(&mut self) {
        let settings = loop {
            let frame = self.frame().await.unwrap();
            if frame.kind == SETTINGS {
                break frame.payload;
            }
        };
        for setting in settings.chunks_exact(6) {
            if setting[..2] == INITIAL_WINDOW_SIZE.to_be_bytes() {
                self.window = u32::from_be_bytes(setting[2..].try_into().unwrap());
            }
        }
        self.send(&frame(SETTINGS, ACK, 0, &[])).await;
    }

    /// Opens `calls` calls of a method by sending headers only. Returns the stream number of the last one.
    pub async fn call(&mut self, path: &str, calls: usize) -> u32 {
        let block = block(path, &self.headers);
        let mut bytes = Vec::new();
        for _ in 0..calls {
            bytes.extend(frame(HEADERS, END_HEADERS, self.next, &block));
            self.next += 2;
        }
        self.send(&bytes).await;
        self.next - 2
    }

    /// Sends part of a call's body and, with `end`, ends the body.
    pub async fn data(&mut self, stream: u32, bytes: &[u8], end: bool) {
        self.send(&frame(DATA, u8::from(end) * END_STREAM, stream, bytes)).await;
    }

    /// Sends as much of `bytes` as flow control allows, as part of a call's body that it does not end. Returns when all
    /// bytes are sent, when the server ends the stream or when the connection closes.
    pub async fn flood(&mut self, stream: u32, bytes: &[u8]) {
        let mut window = i64::from(self.window);
        let mut connection = i64::from(FIRST_WINDOW);
        for part in bytes.chunks(16_384) {
            while window.min(connection) < part.len() as i64 {
                let Some(frame) = self.frame().await else { return };
                if frame.stream == stream && frame.ends() {
                    return;
                }
                if frame.kind == WINDOW_UPDATE {
                    let more = i64::from(u32::from_be_bytes(frame.payload[..4].try_into().unwrap()));
                    if frame.stream == 0 { connection += more } else { window += more }
                }
            }
            (window, connection) = (window - part.len() as i64, connection - part.len() as i64);
            self.data(stream, part, false).await;
        }
    }

    /// Returns a PING acknowledgement, for a PING that was never received.
    pub fn pong() -> Vec<u8> {
        frame(PING, ACK, 0, &[7; 8])
    }

    /// Returns the frames that open a call and reset it at once.
    pub fn opened_and_reset(path: &str, stream: u32) -> Vec<u8> {
        let mut bytes = frame(HEADERS, END_HEADERS, stream, &block(path, &[]));
        // 8 is the error code CANCEL.
        bytes.extend(frame(RESET, 0, stream, &8u32.to_be_bytes()));
        bytes
    }

    /// Writes raw bytes to the connection.
    pub async fn bytes(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Returns the next frame, or `None` if the connection is closed.
    pub async fn frame(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).await.ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload).await.ok()?;
        let stream = u32::from_be_bytes(head[5..9].try_into().unwrap());
        Some(Frame { kind: head[3], flags: head[4], stream, payload })
    }
}
