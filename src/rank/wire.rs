//! What goes over a socket: frames, and the hello with which one begins.
//!
//! A frame is its length in four bytes, little end first, and as many bytes of JSON; collectives add raw values after it. A
//! connection begins with [`MAGIC`] and a frame each way. **These two stay as they are in every version**: so two versions can
//! tell each other that they differ.

use std::io::{self, ErrorKind, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::token::Token;

/// The first bytes of a connection, in both directions.
pub const MAGIC: &[u8; 8] = b"fwdbench";

/// Raised whenever the messages after the hello change; the crate's version must be equal as well.
pub const PROTOCOL: u32 = 1;

/// Longest hello, or answer to one.
pub const HELLO_LIMIT: usize = 4096;
/// Longest message.
pub const MESSAGE_LIMIT: usize = 1 << 28;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Channel {
    /// Commands and their replies.
    Control,
    /// Signs of life, and why a run ends.
    Pulse,
    /// Values of collectives.
    Data,
}

/// Who wants to join.
#[derive(Clone, Serialize, Deserialize)]
pub struct Hello {
    /// The crate's version.
    pub version: String,
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The token.
    pub token: String,
    /// Its rank.
    pub rank: usize,
    /// How many ranks it thinks there are.
    pub world: usize,
    /// What the connection is for.
    pub channel: Channel,
}

/// The answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It may stay.
    Welcome,
    /// It may not; one line.
    Refused(String),
    /// Its token is another one; it may be one of an earlier run.
    Token,
}

/// Why a connection is not let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stranger {
    /// No rank at all.
    Garbage,
    /// A rank, with another token: of another run or another user.
    Token,
    /// It has the token, and cannot take part: the run ends with this line.
    Misfit(String),
}

impl Hello {
    /// Of this version.
    #[must_use]
    pub fn new(token: &Token, rank: usize, world: usize, channel: Channel) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Self { version, protocol: PROTOCOL, token: token.secret().to_owned(), rank, world, channel }
    }

    /// Whether it may join a run of so many ranks; the token is looked at first.
    ///
    /// # Errors
    /// Why it may not.
    pub fn check(&self, token: &Token, world: usize) -> Result<(), Stranger> {
        if !token.is(&self.token) {
            return Err(Stranger::Token);
        }
        let Self { version, protocol, rank, .. } = self;
        let misfit = |text: String| Err(Stranger::Misfit(text));
        let ours = env!("CARGO_PKG_VERSION");
        if version != ours || *protocol != PROTOCOL {
            return misfit(format!(
                "rank {rank} is forward-bench {} (protocol {protocol}), rank 0 is {ours} (protocol {PROTOCOL}); start the \
                 same executable everywhere",
                version.escape_default()
            ));
        }
        if self.world != world {
            return misfit(format!(
                "rank {rank} expects {} ranks, rank 0 expects {world}; give all the same layout and WORLD_SIZE",
                self.world
            ));
        }
        if *rank == 0 || *rank >= world {
            return misfit(format!(
                "a process joins as rank {rank} of {world}, where 1 to {} are awaited; look at RANK and --node-rank",
                world - 1
            ));
        }
        Ok(())
    }
}

/// Writes magic and one frame.
///
/// # Errors
/// The system's.
pub fn write_first(stream: &mut impl Write, body: &impl Serialize) -> io::Result<()> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(frame(body)?);
    stream.write_all(&bytes)
}

/// Reads magic and one frame. Of anything else, no more than eight bytes are read.
///
/// # Errors
/// [`ErrorKind::InvalidData`] for what is none of ours, else the system's.
pub fn read_first<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic)?;
    if &magic != MAGIC {
        return Err(ErrorKind::InvalidData.into());
    }
    read(stream, HELLO_LIMIT)
}

/// Writes one frame.
///
/// # Errors
/// The system's.
pub fn write(stream: &mut impl Write, body: &impl Serialize) -> io::Result<()> {
    stream.write_all(&frame(body)?)
}

/// One frame as bytes.
///
/// # Errors
/// If the body is longer than any frame may be.
pub fn frame(body: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, body)?;
    let length = bytes.len() - 4;
    if length > MESSAGE_LIMIT {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            format!("a message of {length} bytes is too long"),
        ));
    }
    bytes[..4].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    Ok(bytes)
}

/// Reads one frame of at most `limit` bytes.
///
/// # Errors
/// [`ErrorKind::InvalidData`] for a longer one or one that does not fit; else the system's.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read, limit: usize) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let bytes = read_bytes(stream, u64::from(u32::from_le_bytes(length)), limit as u64)?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// Takes one frame off the front of what was read so far; `None` if it is not whole yet.
///
/// # Errors
/// As [`read`].
pub fn take<T: DeserializeOwned>(bytes: &mut Vec<u8>, limit: usize) -> io::Result<Option<T>> {
    let Some(length) = bytes.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > limit {
        return Err(too_long(length as u64, limit as u64));
    }
    if bytes.len() < 4 + length {
        return Ok(None);
    }
    let body = serde_json::from_slice(&bytes[4..4 + length])?;
    bytes.drain(..4 + length);
    Ok(Some(body))
}

/// Reads so many bytes, if they are not too many; memory grows with what really arrives.
fn read_bytes(stream: &mut impl Read, length: u64, limit: u64) -> io::Result<Vec<u8>> {
    if length > limit {
        return Err(too_long(length, limit));
    }
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < length { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

fn too_long(length: u64, limit: u64) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes, where {limit} are allowed"))
}

/// How a connection was lost, in words.
#[must_use]
pub fn how(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its connection closed".to_owned()
        }
        _ => format!("its connection failed: {error}"),
    }
}

/// Values on the wire at a time, so that a payload needs no second copy.
const CHUNK: usize = 1 << 14;

/// Writes values, little end first.
///
/// # Errors
/// The system's.
pub fn write_values(stream: &mut impl Write, values: &[f32]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(4 * CHUNK.min(values.len()));
    for chunk in values.chunks(CHUNK) {
        bytes.clear();
        bytes.extend(chunk.iter().flat_map(|value| value.to_le_bytes()));
        stream.write_all(&bytes)?;
    }
    Ok(())
}

/// Reads so many values.
///
/// # Errors
/// The system's.
pub fn read_values(stream: &mut impl Read, count: usize) -> io::Result<Vec<f32>> {
    let (mut values, mut bytes) = (Vec::new(), vec![0; 4 * CHUNK.min(count)]);
    while values.len() < count {
        let part = &mut bytes[..4 * CHUNK.min(count - values.len())];
        stream.read_exact(part)?;
        values.extend(part.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)));
    }
    Ok(values)
}

#[cfg(test)]
mod tests;
