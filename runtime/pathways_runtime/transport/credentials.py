"""A job's credentials: what its processes show one another on every connection between hosts.

The launcher makes them once per job: a certificate authority of this job, and one certificate with its key that all
processes of the job share. The authority's key is dropped once it has signed, so nobody can make another. Whoever shows
the certificate is of the job, and that is all a peer needs to know; host names are not compared, as every holder may
stand on any host of the job.

They live in one file, 0600 in a 0700 folder, and travel as one text (``to_text``), never on a command line or in an
environment.
"""

import contextlib
import datetime
import hashlib
import hmac
import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "credentials.pem"

#: Longer than any job: a job must not end because its certificate did.
DEFAULT_VALID_S = 366 * 86_400.0
#: Clocks of hosts may differ by this.
_CLOCK_SKEW_S = 3600.0

_BLOCK = re.compile(r"-----BEGIN ([A-Z ]+)-----\n[A-Za-z0-9+/=\n]+-----END \1-----\n?")
_KINDS = ["CERTIFICATE", "CERTIFICATE", "PRIVATE KEY"]


class CredentialsError(ValueError):
    """Credentials that are missing, not credentials, or open to others; the message never shows them."""


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """What every process of one job holds.

    Attributes:
        authority: the job's certificate authority, PEM.
        certificate: the certificate that all processes of the job show, PEM.
        key: its private key, PEM.
    """

    authority: str
    certificate: str
    key: str

    def __repr__(self) -> str:
        return f"<credentials of job {self.fingerprint()}>"

    @classmethod
    def make(cls, valid_s: float = DEFAULT_VALID_S) -> "Credentials":
        """Fresh credentials, in memory only."""
        # Only the launcher makes credentials; loading this library would cost every process 0.1 s.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        def name(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        def usage(*, is_authority: bool) -> x509.KeyUsage:
            return x509.KeyUsage(
                digital_signature=not is_authority,
                key_cert_sign=is_authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            )

        now = datetime.datetime.now(datetime.UTC)
        starts, ends = now - datetime.timedelta(seconds=_CLOCK_SKEW_S), now + datetime.timedelta(seconds=valid_s)
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority_name = name("slurm-pathways job authority")
        authority = (
            x509.CertificateBuilder()
            .subject_name(authority_name)
            .issuer_name(authority_name)
            .public_key(authority_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(starts)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage(is_authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        key = ec.generate_private_key(ec.SECP256R1())
        both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name("slurm-pathways job"))
            .issuer_name(authority_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(starts)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage(is_authority=False), critical=True)
            .add_extension(both_ends, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return cls(
            authority.public_bytes(pem).decode(),
            certificate.public_bytes(pem).decode(),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode(),
        )

    @classmethod
    def create(cls, folder: Path, valid_s: float = DEFAULT_VALID_S) -> "Credentials":
        """Fresh credentials, kept in ``folder``.

        Raises:
            CredentialsError, OSError: see ``save``.
        """
        made = cls.make(valid_s)
        made.save(folder)
        return made

    def save(self, folder: Path) -> None:
        """Write them to ``folder``, which is made (0700) if it is not there.

        Raises:
            CredentialsError: others could get into the folder, or it has credentials already.
            OSError: it cannot be written.
        """
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_private(folder, "folder")
        path = folder / FILE_NAME
        try:
            # Exclusive: neither a link that somebody laid nor the credentials of a job that runs.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as failure:
            raise CredentialsError(f"{path} is there already; a job's credentials are written once") from failure
        with os.fdopen(fd, "w") as file:
            file.write(self.to_text())

    @classmethod
    def load(cls, folder: Path) -> "Credentials":
        """The credentials in ``folder``.

        Raises:
            CredentialsError: there are none, or others can read them.
        """
        path = folder / FILE_NAME
        try:
            _check_private(path, "file")
            text = path.read_text()
        except OSError as failure:
            raise CredentialsError(f"no credentials in {folder}: {failure.strerror}") from failure
        try:
            return cls.from_text(text)
        except CredentialsError as failure:
            raise CredentialsError(f"{path}: {failure}") from failure

    def to_text(self) -> str:
        """All of it as one ASCII text, secret key included, for a channel that only the job's user can read."""
        return self.authority + self.certificate + self.key

    @classmethod
    def from_text(cls, text: str) -> "Credentials":
        """What ``to_text`` gave.

        Raises:
            CredentialsError: it is something else.
        """
        blocks = list(_BLOCK.finditer(text))
        if [block[1] for block in blocks] != _KINDS:
            raise CredentialsError("this is no text of credentials: it must be two certificates and a private key")
        authority, certificate, key = (block[0].rstrip("\n") + "\n" for block in blocks)
        found = cls(authority, certificate, key)
        try:
            found.server_context()
        except (ssl.SSLError, ValueError) as failure:
            raise CredentialsError(f"these credentials cannot be used: {type(failure).__name__}") from failure
        return found

    def fingerprint(self) -> str:
        """Names the job's credentials in logs; no secret."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.authority)).hexdigest()[:16]

    def derived_key(self, purpose: str) -> bytes:
        """32 secret bytes for ``purpose``, the same in all processes of the job."""
        return hmac.digest(self.key.encode(), f"slurm-pathways {purpose}".encode(), "sha256")

    def server_context(self) -> ssl.SSLContext:
        """For the side that accepts: TLS 1.3, refuses whoever does not show this job's certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # No resumption, hence no early data, hence nothing that could be replayed.
        context.num_tickets = 0
        self._complete(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """For the side that connects: TLS 1.3, refuses whoever does not show this job's certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        self._complete(context)
        return context

    def _complete(self, context: ssl.SSLContext) -> None:
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # An end of TCP without TLS's own ends that direction only. What is sent over it says by itself what is whole.
        context.options |= getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
        # The job's authority only: PROTOCOL_TLS_* loads none of the system's.
        context.load_verify_locations(cadata=self.authority)
        # OpenSSL wants a file; this one has no name and lives as long as this block.
        with os.fdopen(os.memfd_create("credentials", os.MFD_CLOEXEC), "w") as file:
            file.write(self.certificate + self.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")


def _check_private(path: Path, noun: str) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CredentialsError(f"the {noun} {path} is a link")
    if status.st_uid != os.geteuid():
        raise CredentialsError(f"the {noun} {path} belongs to another user ({status.st_uid})")
    if status.st_mode & 0o077:
        raise CredentialsError(
            f"the {noun} {path} is open to others (mode {stat.S_IMODE(status.st_mode):o}): it must be "
            f"{'700' if noun == 'folder' else '600'}"
        )
