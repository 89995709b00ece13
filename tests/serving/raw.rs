//! HTTP/2 by hand, for clients that behave as no library lets them. Headers are sent uncompressed, and what comes
//! back is told by its frames' kinds only.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Kinds of frames.
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The setting of how much may be sent on a stream.
const INITIAL_WINDOW_SIZE: u16 = 4;
/// The most that can be allowed.
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// What is allowed on a connection before anybody says so.
const FIRST_WINDOW: u32 = 65_535;
/// Flags of them.
pub const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// A connection.
pub struct Raw {
    stream: TcpStream,
    next: u32,
    /// What may be sent on a new stream, as far as the server has said.
    window: u32,
    /// Names and values that each call has beside its own.
    headers: Vec<(&'static str, String)>,
}

/// What came.
#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// Nothing follows on its stream.
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

/// The headers of a call.
fn block(path: &str, more: &[(&str, String)]) -> Vec<u8> {
    // POST, http, then names and values with their lengths.
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

/// A gRPC message with its prefix.
pub fn message(bytes: &[u8]) -> Vec<u8> {
    let mut framed = vec![0];
    framed.extend((bytes.len() as u32).to_be_bytes());
    framed.extend(bytes);
    framed
}

impl Raw {
    /// Connects to `http://HOST:PORT`; what comes may be 64 KiB long, and no more.
    pub async fn open(address: &str) -> Raw {
        let stream = TcpStream::connect(address.trim_start_matches("http://")).await.unwrap();
        let mut raw = Raw { stream, next: 1, window: FIRST_WINDOW, headers: Vec::new() };
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        bytes.extend(frame(SETTINGS, 0, 0, &[]));
        raw.send(&bytes).await;
        raw
    }

    /// Connects likewise; as much as it likes may come, of which the system here keeps little.
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

    /// The server's settings are taken note of.
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

    /// Opens calls of this method with headers and nothing else; gives the last one's number.
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

    /// Sends of a call's body.
    pub async fn data(&mut self, stream: u32, bytes: &[u8], end: bool) {
        self.send(&frame(DATA, u8::from(end) * END_STREAM, stream, bytes)).await;
    }

    /// Sends of a call's body as much as may be sent, and does not end it.
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

    /// What answers what was never asked.
    pub fn pong() -> Vec<u8> {
        frame(PING, ACK, 0, &[7; 8])
    }

    /// What opens a call and ends it.
    pub fn opened_and_reset(path: &str, stream: u32) -> Vec<u8> {
        let mut bytes = frame(HEADERS, END_HEADERS, stream, &block(path, &[]));
        // CANCEL.
        bytes.extend(frame(RESET, 0, stream, &8u32.to_be_bytes()));
        bytes
    }

    /// Bytes as they are.
    pub async fn bytes(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// The next frame, or that the connection is closed.
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
