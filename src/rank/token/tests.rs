//! Tests of `rank::token`.

use super::*;

#[test]
fn a_token_is_itself_alone_and_never_printed() {
    let token = Token::random().unwrap();
    assert!(token.is(token.secret()) && !token.is("") && !token.is(&token.secret()[1..]));
    assert!(!Token::random().unwrap().is(token.secret()));
    assert!(!format!("{token:?}").contains(token.secret()));
}

#[test]
fn a_short_token_is_refused_without_naming_it() {
    let error = Token::from_environment(&|_| Some("hunter2".to_owned())).unwrap_err();
    assert_eq!(error.status(), 2);
    assert!(!error.to_string().contains("hunter2"), "{error}");
    assert!(Token::from_environment(&|_| None).unwrap().is_none());
}

#[test]
fn a_file_is_of_one_user_replaced_and_removed() {
    let port = 1; // nobody listens there
    let (old, new) = (Token::random().unwrap(), Token::random().unwrap());
    std::mem::forget(TokenFile::create(port, &old).unwrap()); // a run that was killed
    let file = TokenFile::create(port, &new).unwrap();
    assert!(read(port).unwrap().unwrap().is(new.secret()));
    assert_eq!(std::fs::metadata(&file.0).unwrap().mode() & 0o777, 0o600);
    let path = file.0.clone();
    drop(file);
    assert!(!path.exists() && read(port).unwrap().is_none());
}

#[test]
fn a_file_that_others_can_read_or_a_link_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let token = Token::random().unwrap();
    let file = TokenFile::create(2, &token).unwrap();
    std::fs::set_permissions(&file.0, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(read(2).unwrap_err().to_string().contains("this user's alone"));
    let link = TokenFile(path(&folder().unwrap(), 3));
    std::os::unix::fs::symlink(&file.0, &link.0).unwrap();
    assert!(read(3).is_err());
}
