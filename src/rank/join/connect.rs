//! The other ranks: each connects to rank 0, once for each channel, and tries again until its time is up.

use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::at_once;
use super::gather::Until;
use crate::rank::RankError;
use crate::rank::launch::Member;
use crate::rank::pulse::Pulses;
use crate::rank::token::{self, Token};
use crate::rank::watchdog::Watchdog;
use crate::rank::wire::{self, Answer, Channel, Hello};

/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(50);
/// For one attempt to be answered.
const ANSWER: Duration = Duration::from_secs(10);

/// Connects each channel but that of signs of life, which begin at once; in the order of `channels`.
pub fn all(
    member: &Member,
    watchdog: &Watchdog,
    channels: &[Channel],
    pulses: &Pulses,
) -> Result<Vec<TcpStream>, RankError> {
    if crate::rank::fault::at("connect", member.rank) {
        return Err(RankError::Refused("asked to fail at connect".to_owned()));
    }
    let limit = watchdog.timeouts().connect;
    let end = Instant::now() + limit;
    let mut streams = Vec::new();
    for &channel in channels {
        let stream = one(member, channel, end, limit)?;
        if channel == Channel::Pulse {
            let lost = |error: std::io::Error| RankError::Lost { rank: 0, how: wire::how(&error) };
            pulses.add(0, stream).map_err(lost)?;
        } else {
            streams.push(stream);
        }
    }
    Ok(streams)
}

/// Why an attempt failed.
enum Attempt {
    /// It may go better later.
    Again(String),
    /// It will not.
    Never(RankError),
}

fn one(member: &Member, channel: Channel, end: Instant, limit: Duration) -> Result<TcpStream, RankError> {
    loop {
        let why = match attempt(member, channel, end) {
            Ok(stream) => return Ok(stream),
            Err(Attempt::Never(error)) => return Err(error),
            Err(Attempt::Again(why)) => why,
        };
        if Instant::now() + AGAIN >= end {
            return Err(RankError::NotJoined(format!(
                "rank 0 could not be reached at {}:{} within {} s ({why}); see whether it started, and look at --master-addr and \
                 --control-port",
                member.control.host,
                member.control.port,
                limit.as_secs_f64()
            )));
        }
        std::thread::sleep(AGAIN);
    }
}

fn attempt(member: &Member, channel: Channel, end: Instant) -> Result<TcpStream, Attempt> {
    let again = |error: std::io::Error| Attempt::Again(error.to_string());
    let (token, of_user) = shown(member)?;
    let control = &member.control;
    let addresses = (control.host.as_str(), control.port).to_socket_addrs().map_err(again)?;
    let mut last = Attempt::Again("the host has no address".to_owned());
    for address in addresses {
        let left = end.saturating_duration_since(Instant::now()).clamp(AGAIN, ANSWER);
        match TcpStream::connect_timeout(&address, left).and_then(at_once) {
            Ok(stream) => return greet(stream, member, channel, (&token, of_user), end),
            Err(error) => last = again(error),
        }
    }
    Err(last)
}

/// The token, and whether it is the user's; else rank 0 puts it into a file, sooner or later.
fn shown(member: &Member) -> Result<(Token, bool), Attempt> {
    if let Some(token) = Token::from_environment(&|name| std::env::var(name).ok()).map_err(Attempt::Never)? {
        return Ok((token, true));
    }
    if member.several_nodes {
        return Err(Attempt::Never(token::needed()));
    }
    match token::read(member.control.port).map_err(Attempt::Never)? {
        Some(token) => Ok((token, false)),
        None => Err(Attempt::Again("rank 0 has not written its token".to_owned())),
    }
}

fn greet(
    mut stream: TcpStream,
    member: &Member,
    channel: Channel,
    (token, of_user): (&Token, bool),
    end: Instant,
) -> Result<TcpStream, Attempt> {
    let again = |error: std::io::Error| Attempt::Again(error.to_string());
    let refused = |text: String| Err(Attempt::Never(RankError::Refused(text)));
    let hello = Hello::new(token, member.rank, member.world, channel);
    stream.set_write_timeout(Some(ANSWER)).map_err(again)?;
    wire::write_first(&mut stream, &hello).map_err(again)?;
    let until = end.min(Instant::now() + ANSWER);
    let answer = wire::read_first(&mut Until { stream: &stream, end: until });
    let (host, port) = (&member.control.host, member.control.port);
    match answer {
        Ok(Answer::Welcome) => {
            stream.set_read_timeout(None).map_err(again)?;
            Ok(stream)
        }
        Ok(Answer::Refused(text)) => refused(text),
        Ok(Answer::Token) if of_user => refused(format!(
            "rank 0 at {host}:{port} has another {}; export the same one everywhere",
            token::VARIABLE
        )),
        Ok(Answer::Token) => Err(Attempt::Again("rank 0 has another token than its file".to_owned())),
        Err(error) if error.kind() == ErrorKind::InvalidData => refused(format!(
            "what listens at {host}:{port} is no rank 0 of forward-bench; choose another --control-port"
        )),
        Err(error) => Err(again(error)),
    }
}
