"""Tags tell tenants apart and do not tell their salts."""

from blake3 import blake3

from pie.page.key import RootKey, tenant_root
from pie.router.tenant import session_tag, tenant_tag

ONE, OTHER = RootKey(bytes(32)), RootKey(bytes([1]) * 32)
SECRET = bytes(range(32))


def test_tags_differ_by_salt_model_and_secret() -> None:
    tags = {
        tenant_tag(model, salt, secret)
        for model in (ONE, OTHER)
        for salt in ("a", "b", "")
        for secret in (None, SECRET, bytes(32))
    }
    assert len(tags) == 2 * 3 * 3


def test_no_salt_has_no_tag() -> None:
    assert tenant_tag(ONE, None, SECRET) == ""


def test_a_salt_alone_does_not_give_its_tag() -> None:
    tag = tenant_tag(ONE, "1234")
    assert tag not in blake3(b"pie/tenant1234").hexdigest()
    assert tag not in tenant_root(ONE, salt="1234").hex()


def test_conversations_differ_by_name_tenant_model_and_secret() -> None:
    tags = {
        session_tag(model, salt, session, secret)
        for model in (ONE, OTHER)
        for salt in (None, "a")
        for session in ("s", "t")
        for secret in (None, SECRET)
    }
    assert len(tags) == 2 * 2 * 2 * 2
    assert tags.isdisjoint({tenant_tag(ONE, "s"), tenant_tag(ONE, "s", SECRET)})


def test_no_conversation_has_no_tag() -> None:
    assert session_tag(ONE, "a", None, SECRET) == ""
